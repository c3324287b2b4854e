"""What needs a person: one table of rules, told to Prometheus as alerts and watched by the coordinator itself."""

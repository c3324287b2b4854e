"""Alert rules for conditions that need a person, evaluated by Prometheus and by the coordinator."""

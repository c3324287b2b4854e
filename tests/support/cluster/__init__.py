"""Test support for the cluster: pools in one process, the cluster port, enrolment, and isolated hosts."""

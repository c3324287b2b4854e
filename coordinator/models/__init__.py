"""Models of the pool on disks: pulls, verification, removal and wished replicas."""

"""Models of the pool: pulls onto disks, and wished replicas in memory."""

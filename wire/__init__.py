"""What the machines say to each other, and the memory arithmetic that all of them share."""

"""Tools for operation: the Mac check, the Homebrew formula, and examples of services and monitoring."""

"""Tools for operators: the Mac check, the Homebrew formula, and examples of services and monitoring."""

"""Use of the disk cache by the scheduler: lookup, restoration and writing of prompts."""

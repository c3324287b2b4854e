"""Client of the control API, shared by the command line and the doctor."""

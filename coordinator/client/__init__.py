"""Client of the control API that the command line and the doctor share."""

"""Engine process: entry point, inference thread, interface of engines, crash recorder and errors of the device."""

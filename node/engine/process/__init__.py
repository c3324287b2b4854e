"""Engine process: entry point, inference thread, interface of engines, crash recorder and device."""

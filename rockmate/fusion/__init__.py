"""Groups of ops that run as one compiled kernel each, made before a step is measured and planned."""

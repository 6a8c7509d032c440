"""Groups of ops that run as one compiled kernel each: fused first, measured and planned after."""

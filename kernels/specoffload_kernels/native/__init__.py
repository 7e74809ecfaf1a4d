"""Native attention for CPUs: C++ behind a plain C interface, built at first use."""

"""Files of Nsight Systems."""

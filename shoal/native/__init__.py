"""Native CPU code: the frame step and the codec in C++, without torch. Built with the wheel, or on first use."""

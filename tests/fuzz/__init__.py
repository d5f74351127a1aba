"""Random programs: bodies, loops and transformations that nobody wrote, against unrolled Python loops."""

"""Small programs beside other libraries: in a minute on any machine, or as a page of numbers of a device."""

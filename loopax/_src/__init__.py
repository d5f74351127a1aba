"""The code of loopax. What users import stands above, in `loopax`."""

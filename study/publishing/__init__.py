"""What others need to cite the study, to load its data, to add to it and to check it."""

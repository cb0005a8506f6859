"""The suite `peers`: engines that a user would take instead of specdec, each as a server on this machine."""

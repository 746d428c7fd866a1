"""Where the input of an update comes from."""

"""Methods that are no combination of the forget and the retain gradient of one step."""

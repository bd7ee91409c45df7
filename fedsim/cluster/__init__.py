"""The Ray cluster: connection, placement of actors, failures, and private APIs of Ray."""

"""What tests of step logs share."""

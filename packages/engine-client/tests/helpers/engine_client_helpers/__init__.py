"""What tests of clients share."""

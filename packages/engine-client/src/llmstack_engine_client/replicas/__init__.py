"""Several engine cores as one: balanced, exchanged, or on other machines."""

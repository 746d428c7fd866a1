"""The stores of an echo: slots on the host, and on the devices."""

"""Reads weights that others wrote: LoRAs of any form, models by any names, with every tensor."""

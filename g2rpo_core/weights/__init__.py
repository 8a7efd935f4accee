"""Read weights that others wrote: LoRAs of any form, whole models by any names; every tensor is accounted for."""

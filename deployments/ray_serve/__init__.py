"""All that the product knows of Ray beyond its documented interface: environment switches, what runs in its proxy."""

"""Facts about chips and drivers. Only this package and the registry's `arch` rules name a chip."""

"""The methods of the family, one file each: from inner products to coefficients."""

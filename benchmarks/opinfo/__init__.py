"""How many entries of torch's operator database give the values of eager CPU torch?"""

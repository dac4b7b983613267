"""Units of measurement after a number: symbol -> (one, many), from SI prefixes and a table of the rest."""

PREFIXES = {
    "n": "nano", "µ": "micro", "m": "milli", "c": "centi", "d": "deci", "h": "hecto", "k": "kilo", "M": "mega",
    "G": "giga", "T": "tera", "P": "peta",
}  # fmt: skip
# By symbol: the name of the unit, and the prefixes that are read. Others would match letters or words: "5 PM", "3 Ms",
# "4 B".
SI = {
    "m": ("meter", "nµmcdk"),
    "g": ("gram", "nµmk"),
    "l": ("liter", "µmcd"),
    "L": ("liter", "µmcd"),
    "s": ("second", "nµm"),
    "W": ("watt", "mkMGT"),
    "V": ("volt", "µmkM"),
    "A": ("amp", "µmk"),
    "J": ("joule", "kMG"),
    "N": ("newton", "k"),
    "Pa": ("pascal", "hkMG"),
    "Wh": ("watt hour", "kMGT"),
    "Ah": ("amp hour", "m"),
    "eV": ("electron volt", "kMGT"),
    "mol": ("mole", "nµm"),
    "B": ("byte", "kMGTP"),
    "bit": ("bit", "kMGT"),
}
OTHERS = {
    "m": ("meter", "meters"),
    "g": ("gram", "grams"),
    "l": ("liter", "liters"),
    "L": ("liter", "liters"),
    "s": ("second", "seconds"),
    "W": ("watt", "watts"),
    "V": ("volt", "volts"),
    "Pa": ("pascal", "pascals"),
    "Wh": ("watt hour", "watt hours"),
    "Ah": ("amp hour", "amp hours"),
    "VAC": ("volt A C", "volts A C"),
    "VDC": ("volt D C", "volts D C"),
    "km/h": ("kilometer per hour", "kilometers per hour"),
    "kmh": ("kilometer per hour", "kilometers per hour"),
    "kph": ("kilometer per hour", "kilometers per hour"),
    "mph": ("mile per hour", "miles per hour"),
    "mpg": ("mile per gallon", "miles per gallon"),
    "m/s": ("meter per second", "meters per second"),
    "mi": ("mile", "miles"),
    "ft": ("foot", "feet"),
    "yd": ("yard", "yards"),
    "yds": ("yard", "yards"),
    "ha": ("hectare", "hectares"),
    "mcg": ("microgram", "micrograms"),
    "lb": ("pound", "pounds"),
    "lbs": ("pound", "pounds"),
    "oz": ("ounce", "ounces"),
    "fl oz": ("fluid ounce", "fluid ounces"),
    "gal": ("gallon", "gallons"),
    "qt": ("quart", "quarts"),
    **dict.fromkeys(("tsp", "Tsp", "TSP", "tsps"), ("teaspoon", "teaspoons")),
    **dict.fromkeys(("tbsp", "Tbsp", "TBSP", "tbsps", "tbs", "Tbs"), ("tablespoon", "tablespoons")),
    "cc": ("C C", "C Cs"),
    "mmHg": ("millimeter of mercury", "millimeters of mercury"),
    "psi": ("pound per square inch", "pounds per square inch"),
    "KB": ("kilobyte", "kilobytes"),
    "KiB": ("kibibyte", "kibibytes"),
    "MiB": ("mebibyte", "mebibytes"),
    "GiB": ("gibibyte", "gibibytes"),
    "TiB": ("tebibyte", "tebibytes"),
    "Hz": ("hertz", "hertz"),
    "kHz": ("kilohertz", "kilohertz"),
    "MHz": ("megahertz", "megahertz"),
    "GHz": ("gigahertz", "gigahertz"),
    "THz": ("terahertz", "terahertz"),
    "dB": ("decibel", "decibels"),
    "dpi": ("dot per inch", "dots per inch"),
    "sec": ("second", "seconds"),
    "secs": ("second", "seconds"),
    "min": ("minute", "minutes"),
    "mins": ("minute", "minutes"),
    "h": ("hour", "hours"),
    "hr": ("hour", "hours"),
    "hrs": ("hour", "hours"),
    "wk": ("week", "weeks"),
    "wks": ("week", "weeks"),
    "mos": ("month", "months"),
    "yr": ("year", "years"),
    "yrs": ("year", "years"),
    "hp": ("horsepower", "horsepower"),
    "Nm": ("newton meter", "newton meters"),
    "lb-ft": ("pound foot", "pound feet"),
    "ft-lb": ("foot pound", "foot pounds"),
    "ft-lbs": ("foot pound", "foot pounds"),
    "inHg": ("inch of mercury", "inches of mercury"),
    "cal": ("calorie", "calories"),
    "kcal": ("kilocalorie", "kilocalories"),
    "px": ("pixel", "pixels"),
    "pts": ("point", "points"),
    "fps": ("frame per second", "frames per second"),
    "rpm": ("revolution per minute", "revolutions per minute"),
    "bpm": ("beat per minute", "beats per minute"),
}
LENGTHS = {
    "mm": ("millimeter", "millimeters"),
    "cm": ("centimeter", "centimeters"),
    "m": ("meter", "meters"),
    "km": ("kilometer", "kilometers"),
    "in": ("inch", "inches"),
    "ft": ("foot", "feet"),
    "yd": ("yard", "yards"),
    "mi": ("mile", "miles"),
}
POWERS = {"2": "square", "3": "cubic", "sq": "square", "square": "square", "cu": "cubic", "cubic": "cubic"}


def _with_prefixes() -> dict[str, tuple[str, str]]:
    return {
        prefix + symbol: (PREFIXES[prefix] + name, f"{PREFIXES[prefix]}{name}s")
        for symbol, (name, prefixes) in SI.items()
        for prefix in prefixes
    }


def _rates() -> dict[str, tuple[str, str]]:
    """Return bits per second, in the capitals that people use: Mbps, mbps, kbps, Kbps."""
    names = {"k": "kilobit", "K": "kilobit", "m": "megabit", "M": "megabit", "g": "gigabit", "G": "gigabit"}
    return {f"{short}bps": (f"{name} per second", f"{name}s per second") for short, name in names.items()}


UNITS: dict[str, tuple[str, str]] = {**_with_prefixes(), **_rates(), **OTHERS}

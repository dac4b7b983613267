"""Currency signs and codes, with the words they are read as."""

# By sign: singular and plural of the currency and of its hundredth, which is empty if it is not in use.
CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
    "¥": ("yen", "yen", "sen", "sen"),
    "₹": ("rupee", "rupees", "paisa", "paise"),
    "¢": ("cent", "cents", "", ""),
    "₩": ("won", "won", "", ""),
    "₽": ("ruble", "rubles", "kopeck", "kopecks"),
    "₺": ("lira", "lira", "", ""),
    "₱": ("peso", "pesos", "centavo", "centavos"),
    "₪": ("shekel", "shekels", "", ""),
    "₫": ("dong", "dong", "", ""),
    "₦": ("naira", "naira", "", ""),
    "₴": ("hryvnia", "hryvnias", "", ""),
    "฿": ("baht", "baht", "", ""),
    "₿": ("bitcoin", "bitcoins", "", ""),
}
MULTIPLES = {"k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion", "t": "trillion"}
# Signs that stand before their amount: all but the cent.
SIGNS = "".join(sign for sign in CURRENCIES if sign != "¢")
SIGN = f"[{SIGNS}]"

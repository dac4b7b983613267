"""English names of months and their abbreviations: one copy for dates, ranges and abbreviations."""

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
# "Sept" beside the three letters; "May" has no abbreviation.
MONTH_OF = {month[:3]: month for month in MONTHS if month != "May"} | {"Sept": "September"}

"""Builds emoji.parquet.  Knows the two npm packages and which emojis we keep; knows nothing of captions.

    npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0   # then untar each
    python -m data.emoji.build --noto DIR --twemoji DIR --out data/emoji/emoji.parquet

DIR is an unpacked npm package (the folder with `emoji.json` and `img/`).  One row per (name, style), sorted; the
same packages and the same pyarrow give the same bytes.
"""

import argparse
import hashlib
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SIZE = 64  # pixels, of every image
NOVEL_FRACTION = 0.05  # of the names, core and other names apart

# (category of emoji.json, subcategory or "*") -> our category; the others (people, flags, keycaps, signs) are left out
CATEGORIES = {
    ("Smileys & Emotion", "heart"): "shapes",
    ("Smileys & Emotion", "emotion"): "shapes",
    ("Smileys & Emotion", "monkey-face"): "animals",
    ("Smileys & Emotion", "*"): "faces",
    ("People & Body", "hand-fingers-open"): "body",
    ("People & Body", "hand-fingers-partial"): "body",
    ("People & Body", "hand-single-finger"): "body",
    ("People & Body", "hand-fingers-closed"): "body",
    ("People & Body", "hands"): "body",
    ("People & Body", "body-parts"): "body",
    ("Animals & Nature", "plant-flower"): "nature",
    ("Animals & Nature", "plant-other"): "nature",
    ("Animals & Nature", "*"): "animals",
    ("Food & Drink", "*"): "food",
    ("Travel & Places", "place-geographic"): "nature",
    ("Travel & Places", "sky & weather"): "nature",
    ("Travel & Places", "time"): "objects",
    ("Travel & Places", "*"): "travel",
    ("Activities", "*"): "activities",
    ("Objects", "*"): "objects",
    ("Symbols", "geometric"): "shapes",
}

# fmt: off
LEFT_OUT = {  # official names: text, signs, near-duplicates
    "GROWING HEART", "BEATING HEART", "REVOLVING HEARTS", "HEART DECORATION", "HEART EXCLAMATION", "MENDING HEART",
    "LIGHT BLUE HEART", "GREY HEART", "HUNDRED POINTS SYMBOL", "ANGER SYMBOL", "DIZZY SYMBOL", "DASH SYMBOL",
    "EYE IN SPEECH BUBBLE", "LEFT SPEECH BUBBLE", "RIGHT ANGER BUBBLE", "SLEEPING SYMBOL", "DOTTED LINE FACE",
    "LEFTWARDS PUSHING HAND", "RIGHTWARDS PUSHING HAND", "REVERSED HAND WITH MIDDLE FINGER EXTENDED",
    "FOGGY", "MOTORWAY", "SPEAKER WITH ONE SOUND WAVE", "MOBILE PHONE WITH RIGHTWARDS ARROW AT LEFT",
    "RIGHT-POINTING MAGNIFYING GLASS", "CHART WITH UPWARDS TREND AND YEN SIGN", "LOVE HOTEL", "PLACARD",
    "BLACK MEDIUM SQUARE", "WHITE MEDIUM SQUARE", "BLACK MEDIUM SMALL SQUARE", "WHITE MEDIUM SMALL SQUARE",
    "BLACK SMALL SQUARE", "WHITE SMALL SQUARE", "SMALL ORANGE DIAMOND", "SMALL BLUE DIAMOND", "RADIO BUTTON",
    "DIAMOND SHAPE WITH A DOT INSIDE", "WHITE SQUARE BUTTON", "BLACK SQUARE BUTTON", "DOWN-POINTING RED TRIANGLE",
    "UP-POINTING RED TRIANGLE", "MEDIUM WHITE CIRCLE", "WHITE LARGE SQUARE",
}

RENAMED = {  # official name -> the well-known one (mostly CLDR's); every other name is only lower-cased
    "SMILING FACE WITH OPEN MOUTH": "grinning face with big eyes",
    "SMILING FACE WITH OPEN MOUTH AND SMILING EYES": "grinning face with smiling eyes",
    "GRINNING FACE WITH SMILING EYES": "beaming face with smiling eyes",
    "SMILING FACE WITH OPEN MOUTH AND TIGHTLY-CLOSED EYES": "grinning squinting face",
    "SMILING FACE WITH OPEN MOUTH AND COLD SWEAT": "grinning face with sweat",
    "ROLLING ON THE FLOOR LAUGHING": "face rolling on the floor laughing",
    "SMILING FACE WITH SMILING EYES AND THREE HEARTS": "smiling face with hearts",
    "SMILING FACE WITH HEART-SHAPED EYES": "smiling face with heart-eyes",
    "GRINNING FACE WITH STAR EYES": "star-struck face",
    "FACE THROWING A KISS": "face blowing a kiss",
    "WHITE SMILING FACE": "smiling face",
    "FACE SAVOURING DELICIOUS FOOD": "face savoring food",
    "FACE WITH STUCK-OUT TONGUE": "face with tongue",
    "FACE WITH STUCK-OUT TONGUE AND WINKING EYE": "winking face with tongue",
    "GRINNING FACE WITH ONE LARGE AND ONE SMALL EYE": "zany face",
    "FACE WITH STUCK-OUT TONGUE AND TIGHTLY-CLOSED EYES": "squinting face with tongue",
    "SMILING FACE WITH SMILING EYES AND HAND COVERING MOUTH": "face with hand over mouth",
    "FACE WITH FINGER COVERING CLOSED LIPS": "shushing face",
    "FACE WITH ONE EYEBROW RAISED": "face with raised eyebrow",
    "FACE WITH OPEN MOUTH VOMITING": "vomiting face",
    "OVERHEATED FACE": "hot face",
    "FREEZING FACE": "cold face",
    "FACE WITH UNEVEN EYES AND WAVY MOUTH": "woozy face",
    "DIZZY FACE": "face with crossed-out eyes",
    "SHOCKED FACE WITH EXPLODING HEAD": "exploding head",
    "FACE WITH COWBOY HAT": "cowboy hat face",
    "FACE WITH PARTY HORN AND PARTY HAT": "partying face",
    "FACE WITH PLEADING EYES": "pleading face",
    "FACE WITH OPEN MOUTH AND COLD SWEAT": "anxious face with sweat",
    "DISAPPOINTED BUT RELIEVED FACE": "sad but relieved face",
    "FACE WITH COLD SWEAT": "downcast face with sweat",
    "FACE WITH LOOK OF TRIUMPH": "face with steam from nose",
    "POUTING FACE": "enraged face",
    "SERIOUS FACE WITH SYMBOLS COVERING MOUTH": "face with symbols on mouth",
    "IMP": "angry face with horns",
    "JAPANESE OGRE": "ogre",
    "JAPANESE GOBLIN": "goblin",
    "EXTRATERRESTRIAL ALIEN": "alien",
    "ROBOT FACE": "robot",
    "SMILING CAT FACE WITH OPEN MOUTH": "grinning cat",
    "GRINNING CAT FACE WITH SMILING EYES": "grinning cat with smiling eyes",
    "CAT FACE WITH TEARS OF JOY": "cat with tears of joy",
    "SMILING CAT FACE WITH HEART-SHAPED EYES": "smiling cat with heart-eyes",
    "CAT FACE WITH WRY SMILE": "cat with wry smile",
    "KISSING CAT FACE WITH CLOSED EYES": "kissing cat",
    "WEARY CAT FACE": "weary cat",
    "CRYING CAT FACE": "crying cat",
    "POUTING CAT FACE": "pouting cat",
    "HEAVY BLACK HEART": "red heart",
    "COLLISION SYMBOL": "collision",
    "SPLASHING SWEAT SYMBOL": "sweat droplets",
    "WAVING HAND SIGN": "waving hand",
    "RAISED HAND WITH PART BETWEEN MIDDLE AND RING FINGERS": "vulcan salute",
    "OK HAND SIGN": "ok hand",
    "HAND WITH INDEX AND MIDDLE FINGERS CROSSED": "crossed fingers",
    "I LOVE YOU HAND SIGN": "love-you gesture",
    "WHITE LEFT POINTING BACKHAND INDEX": "hand pointing left",
    "WHITE RIGHT POINTING BACKHAND INDEX": "hand pointing right",
    "WHITE UP POINTING BACKHAND INDEX": "hand pointing up",
    "WHITE DOWN POINTING BACKHAND INDEX": "hand pointing down",
    "WHITE UP POINTING INDEX": "index finger pointing up",
    "INDEX POINTING AT THE VIEWER": "index finger pointing at the viewer",
    "THUMBS UP SIGN": "thumbs up",
    "THUMBS DOWN SIGN": "thumbs down",
    "FISTED HAND SIGN": "oncoming fist",
    "CLAPPING HANDS SIGN": "clapping hands",
    "PERSON RAISING BOTH HANDS IN CELEBRATION": "raising hands",
    "OPEN HANDS SIGN": "open hands",
    "PERSON WITH FOLDED HANDS": "folded hands",
    "WOLF FACE": "wolf",
    "UNICORN FACE": "unicorn",
    "ZEBRA FACE": "zebra",
    "GIRAFFE FACE": "giraffe",
    "DROMEDARY CAMEL": "camel",
    "BACTRIAN CAMEL": "two-hump camel",
    "BLACK BIRD": "blackbird",
    "BUG": "caterpillar",
    "LADY BEETLE": "ladybug",
    "EAR OF RICE": "sheaf of rice",
    "AUBERGINE": "eggplant",
    "EAR OF MAIZE": "ear of corn",
    "BAGUETTE BREAD": "baguette",
    "COOKING": "fried egg",
    "CURRY AND RICE": "curry rice",
    "FISH CAKE WITH SWIRL DESIGN": "fish cake with swirl",
    "HOCHO": "kitchen knife",
    "EARTH GLOBE EUROPE-AFRICA": "globe showing europe and africa",
    "EARTH GLOBE AMERICAS": "globe showing the americas",
    "EARTH GLOBE ASIA-AUSTRALIA": "globe showing asia and australia",
    "SILHOUETTE OF JAPAN": "map of japan",
    "HOUSE BUILDING": "house",
    "OFFICE BUILDING": "office building",
    "EUROPEAN CASTLE": "castle",
    "STEAM LOCOMOTIVE": "locomotive",
    "HIGH-SPEED TRAIN WITH BULLET NOSE": "bullet train",
    "AUTOMOBILE": "car",
    "ONCOMING AUTOMOBILE": "oncoming car",
    "RECREATIONAL VEHICLE": "sport utility vehicle",
    "POLICE CARS REVOLVING LIGHT": "police car light",
    "OCTAGONAL SIGN": "stop sign",
    "CLOCK FACE THREE OCLOCK": "clock face",
    "NEW MOON SYMBOL": "new moon",
    "WAXING CRESCENT MOON SYMBOL": "waxing crescent moon",
    "FIRST QUARTER MOON SYMBOL": "first quarter moon",
    "WAXING GIBBOUS MOON SYMBOL": "waxing gibbous moon",
    "FULL MOON SYMBOL": "full moon",
    "WANING GIBBOUS MOON SYMBOL": "waning gibbous moon",
    "LAST QUARTER MOON SYMBOL": "last quarter moon",
    "WANING CRESCENT MOON SYMBOL": "waning crescent moon",
    "BLACK SUN WITH RAYS": "sun",
    "WHITE MEDIUM STAR": "star",
    "HIGH VOLTAGE SIGN": "lightning bolt",
    "UMBRELLA ON GROUND": "umbrella on the ground",
    "JACK-O-LANTERN": "jack-o'-lantern",
    "FIREWORK SPARKLER": "sparkler",
    "RED GIFT ENVELOPE": "red envelope",
    "WRAPPED PRESENT": "wrapped gift",
    "FIRST PLACE MEDAL": "gold medal",
    "SECOND PLACE MEDAL": "silver medal",
    "THIRD PLACE MEDAL": "bronze medal",
    "BASKETBALL AND HOOP": "basketball",
    "TENNIS RACQUET AND BALL": "tennis ball",
    "FISHING POLE AND FISH": "fishing pole",
    "RUNNING SHIRT WITH SASH": "running shirt",
    "DIRECT HIT": "bullseye",
    "PISTOL": "water pistol",
    "BILLIARDS": "pool 8 ball",
    "JIGSAW PUZZLE PIECE": "puzzle piece",
    "BLACK SPADE SUIT": "spade suit",
    "BLACK HEART SUIT": "heart suit",
    "BLACK DIAMOND SUIT": "diamond suit",
    "BLACK CLUB SUIT": "club suit",
    "PLAYING CARD BLACK JOKER": "joker card",
    "PERFORMING ARTS": "theater masks",
    "EYEGLASSES": "glasses",
    "WOMANS CLOTHES": "woman's blouse",
    "SCHOOL SATCHEL": "backpack",
    "MANS SHOE": "man's shoe",
    "ATHLETIC SHOE": "running shoe",
    "WOMANS SANDAL": "woman's sandal",
    "WOMANS BOOTS": "woman's boot",
    "WOMANS HAT": "woman's hat",
    "RESCUE WORKER’S HELMET": "rescue worker's helmet",
    "SPEAKER WITH CANCELLATION STROKE": "muted speaker",
    "SPEAKER WITH THREE SOUND WAVES": "loud speaker",
    "PUBLIC ADDRESS LOUDSPEAKER": "public address loudspeaker",
    "CHEERING MEGAPHONE": "megaphone",
    "BELL WITH CANCELLATION STROKE": "bell with slash",
    "MULTIPLE MUSICAL NOTES": "musical notes",
    "HEADPHONE": "headphones",
    "DRUM WITH DRUMSTICKS": "drum",
    "BLACK TELEPHONE": "telephone",
    "PERSONAL COMPUTER": "laptop",
    "LEFT-POINTING MAGNIFYING GLASS": "magnifying glass",
    "ELECTRIC LIGHT BULB": "light bulb",
    "ELECTRIC TORCH": "flashlight",
    "IZAKAYA LANTERN": "red paper lantern",
    "BANKNOTE WITH YEN SIGN": "yen banknote",
    "BANKNOTE WITH DOLLAR SIGN": "dollar banknote",
    "BANKNOTE WITH EURO SIGN": "euro banknote",
    "BANKNOTE WITH POUND SIGN": "pound banknote",
    "E-MAIL SYMBOL": "e-mail",
    "BLACK NIB": "pen nib",
    "BLACK SCISSORS": "scissors",
    "CLOSED LOCK WITH KEY": "lock with key",
    "LINK SYMBOL": "chain link",
    "DNA DOUBLE HELIX": "dna double helix",
    "SHOPPING TROLLEY": "shopping cart",
    "SMOKING SYMBOL": "cigarette",
    "MOYAI": "moai",
    "LARGE RED CIRCLE": "red circle",
    "LARGE ORANGE CIRCLE": "orange circle",
    "LARGE YELLOW CIRCLE": "yellow circle",
    "LARGE GREEN CIRCLE": "green circle",
    "LARGE BLUE CIRCLE": "blue circle",
    "LARGE PURPLE CIRCLE": "purple circle",
    "LARGE BROWN CIRCLE": "brown circle",
    "MEDIUM BLACK CIRCLE": "black circle",
    "LARGE RED SQUARE": "red square",
    "LARGE ORANGE SQUARE": "orange square",
    "LARGE YELLOW SQUARE": "yellow square",
    "LARGE GREEN SQUARE": "green square",
    "LARGE BLUE SQUARE": "blue square",
    "LARGE PURPLE SQUARE": "purple square",
    "LARGE BROWN SQUARE": "brown square",
    "BLACK LARGE SQUARE": "black square",
    "LARGE ORANGE DIAMOND": "orange diamond",
    "LARGE BLUE DIAMOND": "blue diamond",
}

AN = {"hourglass", "hourglass with flowing sand", "herb", "x-ray"}  # an, though the letter says a
A = {"unicorn", "one-piece swimsuit", "euro banknote", "european post office"}  # and the reverse
NO_ARTICLE = {  # plurals, substances, proper names
    "admission tickets", "bacon", "ballet shoes", "beans", "biting lip", "blueberries", "bookmark tabs", "books",
    "bowling", "bread", "briefs", "broccoli", "bubble tea", "bubbles", "building construction", "butter", "camping",
    "canned food", "card index dividers", "chains", "cherries", "chopsticks", "clapping hands",
    "clinking beer mugs", "clinking glasses", "control knobs", "cooked rice", "coral", "crossed fingers",
    "crossed swords", "curry rice", "dango", "eyes", "film frames", "flexed biceps", "fireworks",
    "flower playing cards", "fog", "folded hands", "fondue", "french fries", "garlic", "ginger root", "glasses",
    "gloves", "goggles", "grapes", "headphones", "heart hands", "hot springs", "houses", "ice cream",
    "japanese dolls", "jeans", "kaaba", "linked paperclips", "luggage", "lungs", "maracas", "mate drink",
    "meat on bone", "money with wings", "mount fuji", "musical notes", "nesting dolls", "oden", "open hands",
    "palms up together", "pancakes", "paw prints", "peanuts", "pinched fingers", "popcorn", "pouring liquid",
    "prayer beads", "raising hands", "sake bottle and cup", "scissors", "shaved ice", "shopping bags", "shorts",
    "socks", "soft ice cream", "spaghetti", "sparkles", "statue of liberty", "sunglasses", "sushi", "sweat droplets",
    "theater masks", "thumbs down", "thumbs up", "tokyo tower", "two hearts", "wood", "sunset over buildings",
    "milky way",
}

CORE = [  # curated by eye: known at a glance at 64 pixels in both styles, no near-duplicates
    # faces
    "grinning face", "face with tears of joy", "winking face", "smiling face with halo", "smiling face with hearts",
    "smiling face with heart-eyes", "star-struck face", "face with tongue", "thinking face", "neutral face",
    "face with medical mask", "nauseated face", "hot face", "cold face", "exploding head", "cowboy hat face",
    "partying face", "smiling face with sunglasses", "nerd face", "loudly crying face", "face screaming in fear",
    "enraged face", "smiling face with horns", "skull", "pile of poo", "clown face", "ogre", "goblin", "ghost",
    "alien", "alien monster", "robot",
    # hearts, hands, body
    "red heart", "green heart", "blue heart", "broken heart", "collision", "kiss mark", "thumbs up", "waving hand",
    "ok hand", "victory hand", "flexed biceps", "brain", "tooth", "bone", "eye",
    # animals
    "monkey face", "dog face", "cat face", "fox face", "wolf", "raccoon", "lion face", "tiger face", "horse face",
    "unicorn", "cow face", "pig face", "mouse face", "rabbit face", "bear face", "koala", "panda face", "frog face",
    "chicken", "penguin", "owl", "baby chick", "duck", "swan", "flamingo", "parrot", "peacock", "turtle", "snake",
    "dragon face", "sauropod", "crocodile", "spouting whale", "tropical fish", "blowfish", "shark", "octopus",
    "crab", "lobster", "snail", "butterfly", "caterpillar", "honeybee", "ladybug", "spider", "scorpion", "elephant",
    "giraffe", "zebra", "hedgehog", "bat", "paw prints",
    # plants and sky
    "cherry blossom", "rose", "hibiscus", "sunflower", "tulip", "seedling", "potted plant", "evergreen tree",
    "deciduous tree", "palm tree", "cactus", "four leaf clover", "maple leaf", "mushroom", "volcano", "full moon",
    "crescent moon", "sun with face", "sun", "ringed planet", "star", "cloud", "cloud with lightning", "cyclone",
    "rainbow", "umbrella", "lightning bolt", "snowflake", "snowman", "fire", "droplet", "water wave",
    # food
    "grapes", "watermelon", "tangerine", "lemon", "banana", "pineapple", "red apple", "green apple", "pear",
    "peach", "cherries", "strawberry", "blueberries", "kiwifruit", "tomato", "coconut", "avocado", "eggplant",
    "carrot", "ear of corn", "hot pepper", "broccoli", "onion", "croissant", "pretzel", "pancakes", "waffle",
    "cheese wedge", "meat on bone", "hamburger", "french fries", "slice of pizza", "hot dog", "taco", "fried egg",
    "popcorn", "rice ball", "sushi", "soft ice cream", "doughnut", "cookie", "birthday cake", "cupcake",
    "chocolate bar", "candy", "lollipop", "honey pot", "hot beverage", "wine glass", "cocktail glass", "beer mug",
    # travel
    "globe showing the americas", "house", "castle", "tent", "locomotive", "bus", "ambulance", "fire engine",
    "police car", "taxi", "car", "delivery truck", "tractor", "racing car", "bicycle", "vertical traffic light",
    "stop sign", "anchor", "ring buoy", "sailboat", "ship", "airplane", "helicopter", "rocket", "flying saucer",
    "moai",
    # activities
    "jack-o'-lantern", "christmas tree", "firecracker", "balloon", "party popper", "wrapped gift", "trophy",
    "gold medal", "soccer ball", "baseball", "basketball", "american football", "boxing glove", "bullseye", "yo-yo",
    "kite", "pool 8 ball", "crystal ball", "video game", "game die", "puzzle piece", "teddy bear", "artist palette",
    "ball of yarn",
    # objects
    "hourglass", "watch", "alarm clock", "clock face", "sunglasses", "necktie", "t-shirt", "jeans", "dress",
    "socks", "backpack", "high-heeled shoe", "crown", "top hat", "graduation cap", "billed cap", "lipstick", "ring",
    "gem stone", "bell", "megaphone", "headphones", "accordion", "guitar", "trumpet", "violin", "drum",
    "mobile phone", "telephone", "battery", "laptop", "floppy disk", "television", "camera", "magnifying glass",
    "candle", "light bulb", "red paper lantern", "green book", "scroll", "money bag", "credit card", "envelope",
    "package", "postbox", "pencil", "crayon", "briefcase", "pushpin", "scissors", "lock", "key", "hammer", "axe",
    "bomb", "shield", "gear", "magnet", "test tube", "syringe", "drop of blood", "pill", "door", "toilet", "chair",
    "bucket", "fire extinguisher", "nazar amulet",
]
# fmt: on

FEATURES = {
    "image": {"_type": "Image"},
    "name": {"dtype": "string", "_type": "Value"},
    "article": {"dtype": "string", "_type": "Value"},
    "style": {"dtype": "string", "_type": "Value"},
    "category": {"dtype": "string", "_type": "Value"},
    "core": {"dtype": "bool", "_type": "Value"},
    "split": {"dtype": "string", "_type": "Value"},
}
SCHEMA = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("name", pa.string()),
        ("article", pa.string()),
        ("style", pa.string()),
        ("category", pa.string()),
        ("core", pa.bool_()),
        ("split", pa.string()),
    ],
    # `datasets` reads its column types from here, so that `image` arrives decoded
    metadata={"huggingface": json.dumps({"info": {"features": FEATURES}})},
)


def article(name: str) -> str:
    """Indefinite article of a name: "a", "an", or "" for plurals, substances and proper names."""
    if name in NO_ARTICLE:
        return ""
    return "an" if name in AN or (name[0] in "aeiou" and name not in A) else "a"


def selected(entries: list[dict]) -> dict[str, tuple[str, str]]:
    """Chosen emojis of emoji.json: name -> (category, image file)."""
    chosen = {}
    for entry in entries:
        official = entry["name"]
        category = CATEGORIES.get((entry["category"], entry["subcategory"]), CATEGORIES.get((entry["category"], "*")))
        clock = (official or "").startswith("CLOCK FACE") and official not in RENAMED
        both = entry["has_img_google"] and entry["has_img_twitter"]
        if category is None or clock or not both or official in LEFT_OUT:
            continue
        name = RENAMED.get(official, official.lower())
        if name in chosen:
            raise ValueError(f"two emojis are named {name!r}; names must be unique: add one to RENAMED or LEFT_OUT")
        chosen[name] = (category, entry["image"])
    return chosen


def novel_names(names: list[str]) -> set[str]:
    """The held-out 5% of the names: those with the smallest sha256."""
    return set(
        sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[: round(NOVEL_FRACTION * len(names))]
    )


def rgba_png(path: Path) -> bytes:
    """An RGBA file as it is; a palette or gray+alpha file as RGBA, the same pixels encoded anew."""
    with Image.open(path) as image:
        if image.size != (SIZE, SIZE):
            raise ValueError(f"{path} has {image.size} pixels, not {SIZE}x{SIZE}; give the folders of version 16.0.0")
        if image.mode == "RGBA":
            return path.read_bytes()
        buffer = io.BytesIO()
        image.convert("RGBA").save(buffer, "PNG", optimize=True)
        return buffer.getvalue()


def table(noto: Path, twemoji: Path) -> pa.Table:
    """All rows, sorted by (name, style).  `noto`, `twemoji`: unpacked npm packages."""
    folders = {"noto": noto / "img/google/64", "twemoji": twemoji / "img/twitter/64"}
    chosen = selected(json.loads((noto / "emoji.json").read_text(encoding="utf-8")))
    known = set(chosen)
    for label, words in [("CORE", CORE), ("NO_ARTICLE", NO_ARTICLE), ("AN", AN), ("A", A)]:
        if missing := sorted(set(words) - known):
            raise ValueError(f"{label} lists {missing}, which are not among the {len(known)} names; correct the list")
    core = set(CORE)
    novel = novel_names(sorted(core)) | novel_names(sorted(known - core))
    rows = []
    for name in sorted(chosen):
        category, file = chosen[name]
        for style, folder in folders.items():
            rows.append(
                {
                    "image": {"bytes": rgba_png(folder / file), "path": f"{style}-{file}"},
                    "name": name,
                    "article": article(name),
                    "style": style,
                    "category": category,
                    "core": name in core,
                    "split": "novel" if name in novel else "train",
                }
            )
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noto", type=Path, required=True, help="unpacked emoji-datasource-google 16.0.0")
    parser.add_argument("--twemoji", type=Path, required=True, help="unpacked emoji-datasource-twitter 16.0.0")
    parser.add_argument("--out", type=Path, required=True, help="parquet file to write")
    args = parser.parse_args()
    rows = table(args.noto, args.twemoji)
    pq.write_table(rows, args.out, compression="none", version="2.6", row_group_size=512, write_statistics=False)
    data = args.out.read_bytes()
    print(f"{args.out}: {rows.num_rows} rows, {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()

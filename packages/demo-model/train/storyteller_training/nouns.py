"""Nouns that a story may be about: those used in training, and those held out."""

from __future__ import annotations

import random

from storyteller_training.keywords import ANIMALS, NOUNS, PLURALS, plural


def words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split()))


# No training text asks for one of these: they measure whether the network takes a subject from the request.
HELD_OUT = words("""
badger beaver beetle butterfly camel cheetah cockroach crab cricket crocodile dolphin dragonfly falcon ferret flamingo
gazelle giraffe gorilla hamster hedgehog hippopotamus jackal jellyfish kangaroo kitten ladybird leopard lizard lobster
lynx mole moth octopus otter panda parrot peacock pelican penguin pigeon pony puppy raccoon reindeer scorpion seal
shark snail sparrow squirrel turkey turtle vulture walrus weasel whale woodpecker worm zebra dinosaur acrobat archer
artist astronaut baby barber blacksmith butcher captain carpenter chemist clown dancer dentist detective doctor druid
duke engineer ghost goblin guard jester judge juggler lawyer mayor musician ninja nun nurse painter pilgrim pilot poet
policeman porter robot scholar scientist singer spy student teacher vampire viking weaver writer accordion anchor
arrow barrel basket bell bicycle blanket bottle bowl broom bucket button camera candle carpet cart chair chest chimney
clock coat coin comb compass cradle diamond doll drum envelope fan fiddle flute fork fountain guitar hammer harp hat
helmet kite ladder lantern letter map mask medal needle pearl pencil piano pillow pot pumpkin puppet rocket rope
saddle statue teapot thimble train trumpet umbrella violin airport bakery barn bay cathedral church desert farm
harbour hospital hotel library lighthouse market meadow museum prison school stable station swamp temple theatre
tunnel volcano windmill zoo
""")
CREATURES = words("""
alligator alpaca antelope ape armadillo baboon bat bison blackbird boar buffalo bull calf canary chicken chipmunk
cobra cockerel colt condor cormorant coyote crane cub cuckoo deer dodo dormouse dove eel elk emu fawn finch flea fly
foal gander gnat gull grasshopper grouse gopher hawk heron herring hornet hound hyena ibis iguana jaguar jay
kingfisher kestrel koala lark lemming lemur linnet llama locust lapwing magpie mackerel mammoth marten meerkat minnow
mongoose moose mosquito mule mussel newt ocelot ostrich ox oyster panther partridge pheasant pike plover polecat
porcupine porpoise prawn puffin puma python quail ram rhinoceros robin rook rooster salamander sardine seagull shrew
shrimp skunk skylark sloth slug snipe sow spaniel squid starling starfish stallion stork stoat swallow swift tapir
terrier termite thrush tick tortoise toucan trout tuna unicorn viper vixen wasp wombat wren yak griffin phoenix
basilisk serpent monster caterpillar alien caveman piglet gosling duckling kid nanny-goat tomcat lioness she-bear
tadpole maggot
""")
PERSONS = words("""
abbot actor admiral aunt uncle baron baroness bishop boatman bride bridegroom bard beekeeper brewer butler cabman
chief clerk cobbler coachman conjurer countess count cousin courtier cowherd dairymaid dame drummer duchess elf
explorer ferryman fiddler footman forester fool gaoler general genie governess governor goldsmith grandfather groom
hermit herald hero heroine highwayman housewife imp inventor innkeeper huntsman jeweller lad lady lamplighter landlord
laundress librarian locksmith lord magistrate maid maiden mason messenger milkmaid minister minstrel miner miser monk
neighbour nephew niece nobleman nymph orphan page parson pedlar philosopher physician pixie plumber ploughman potter
postman priest prophet prisoner ranger rider ruler saddler saint scout secretary seamstress sergeant servant smith
smuggler snowman spinner sprite squire stranger sultan swineherd swordsman tanner tramp traveller treasurer twin
tyrant usher vagabond vicar vizier wanderer warrior washerwoman watchman watchmaker werewolf widow widower wife
woodman cowboy zombie footballer fireman superhero photographer politician president banker builder driver gambler
chef dressmaker glover candlemaker gravedigger charcoal-burner chimney-sweep goose-girl stable-boy kitchen-maid
toymaker nurseryman
""")
THINGS = words("""
abacus acorn almanac altar amulet anvil apron axe banner basin bead beam bean bench berry blade block boot bow boiler
bone book bracelet branch brick brooch brush bubble bugle cable cage calendar candlestick cannon canoe cap card
cauldron chain chalice charm cheese cherry chisel cigar cloth cloud club cobweb coffin collar cork couch crate crutch
cupboard curtain cushion dagger desk dial dish drawer dress ear-ring easel elevator engine fence fern file flag flask
football fossil frame fruit funnel garland glass globe glove goblet gong grape grindstone hairpin hammock handkerchief
handle hatchet hook hoop horn horseshoe hourglass icicle inkwell iron jacket jar jewel jug kennel kernel kettle
knapsack knife knot lance leaf lemon lens lid lily lock locket log loaf loom lute magnet marble mast mat match
mattress meteor microscope mitten moccasin mop mug mushroom nail napkin necklace nest net nettle oar onion orange
orchid organ ornament pail pan pane parasol parachute pea peach pebble pen pendulum petticoat pie pin plank plate plum
pocket poker pole poppy potato potion purse puzzle quill quilt raft rainbow rake rattle razor ribbon rifle roof root
rudder rug sack sail sapphire saucer saw scarf sceptre scroll seed shawl shell shovel sickle sieve signpost skirt
slate sledge slipper snowball snowflake sofa spade spear spool spur stamp stick stocking stool straw string stump
sundial swing tambourine tapestry tart teacup tent thistle thorn throne thread ticket tile torch towel tray trunk tub
tulip tunic turnip twig typewriter vase veil wallet walnut wand wardrobe watch wheelbarrow whip wig wreath yacht yarn
yoke zither aeroplane bus car computer lorry machine telephone television tractor spaceship submarine planet comet
rocking-horse
""")
PLACES = words("""
abbey alley arch attic balcony ballroom beach bog brook camp cabin canyon chapel cliff convent corridor cottage
courtyard crossroads dairy den ditch dungeon factory field ford forge fort garret gate glade glacier grave grove hall
hamlet hedge hill hovel hut inn jungle kingdom lake lane lawn lodge manor marsh maze mine moat monastery moor nursery
oasis orchard park parlour pasture path peak pond pool port pyramid quarry ravine reef road ruin shed shop shore
square staircase steeple stream street suburb tavern terrace town tree-house vault vineyard warehouse waterfall well
workshop yard
""")
ALL_CREATURES = tuple(dict.fromkeys((*ANIMALS, *CREATURES)))
TRAINED = tuple(dict.fromkeys((*NOUNS, *CREATURES, *PERSONS, *THINGS, *PLACES)))
IRREGULAR = {
    **PLURALS,
    "calf": "calves", "deer": "deer", "dormouse": "dormice", "ox": "oxen", "moose": "moose", "trout": "trout",
    "wife": "wives", "housewife": "housewives", "knife": "knives", "leaf": "leaves", "loaf": "loaves", "elf": "elves",
    "thief": "thieves", "scarf": "scarves", "reindeer": "reindeer", "potato": "potatoes", "hero": "heroes",
    "crossroads": "crossroads", "superhero": "superheroes", "werewolf": "werewolves", "squid": "squid",
    "volcano": "volcanoes", "sheep": "sheep", "fish": "fish",
}  # fmt: skip
ONSETS = words("b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl sm sn sp st str t th tr v w z")
VOWELS = words("a e i o u a e i o u ai ea ee oa oo ou")
CODAS = words("b ck d g l ll m n ng nk p r rd rm rn sk sp st t tch x zz")


def plural_of(noun: str) -> str:
    """Return the plural of any listed noun."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    for ending, replacement in (("woman", "women"), ("man", "men")):
        if noun.endswith(ending):
            return noun.removesuffix(ending) + replacement
    return plural(noun)


def made_up_noun(rng: random.Random) -> str:
    """Return a word that does not exist, which can only be copied and not remembered."""
    syllables = rng.choice((1, 2, 2, 3))
    text = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables - 1))
    word = text + rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
    return made_up_noun(rng) if word in HELD_OUT else word


def random_noun(rng: random.Random) -> str:
    """Return a training noun of any kind, or now and then a made-up one."""
    kind = rng.random()
    if kind < 0.15:
        return made_up_noun(rng)
    return rng.choice(rng.choice((ALL_CREATURES, PERSONS, PERSONS, THINGS, PLACES, NOUNS)))

"""Sample texts for calibrating a layer before it is quantized (`text.encoders.calibrate`).

Of many kinds and lengths, because features that none of them wakes are rounded coarsely. Written for this purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.text.checkpoints.checkpoint import Ints
from anytorch.text.embed.tokens import TextTokenizer

if TYPE_CHECKING:
    from anytorch.text.embed.recipe import Recipe

LONGEST = 192  # tokens of one example; they lie in rows of one length while they are run

SHORT = """
What time does the last train to Bristol leave on a Sunday?
The committee approved the budget after a debate of three hours.
How do I sort a list of dictionaries by a value in Python?
Heavy rain is expected in the north from Thursday, with gusts of up to 90 km/h.
She had never seen snow before, and stood at the window for a long time.
Error: connection refused while reading the response header from upstream.
Patients with a fever above 39 °C should see a doctor within a day.
The cat slept on the warm bonnet of the car.
Interest rates rose by a quarter of a point, less than markets had feared.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.
Preheat the oven to 180 degrees and grease a shallow tin with butter.
A proof by induction needs a base case and a step.
Terms and conditions apply; the offer ends on 31 March 2027.
He scored twice in the second half, and Ajax won 3-1.
Can I return a pair of shoes that I bought online?
The museum is closed on Mondays and on public holidays.
def mean(values): return sum(values) / len(values)
SELECT name, price FROM products WHERE price < 100 ORDER BY price DESC;
Whales breathe air, feed their young with milk, and never sleep with both halves of the brain.
I am writing to complain about the noise from the building site next door.
The treaty of 1648 ended a war that had emptied whole provinces.
Restart the router, wait for two minutes, and then try again.
Best Italian restaurant near the old harbour, not too expensive
Voltage equals current times resistance.
It was the quietest morning of the year; even the gulls were silent.
Your parcel has been handed to a neighbour.
The algorithm runs in O(n log n) time and needs constant extra memory.
My grandmother kept bees, and knew each hive by its temper.
Shares of the car maker fell 4.2 % after it lowered its forecast.
Symptoms include headache, tiredness and a loss of appetite.
Where can I find the documentation of the older version?
Two thirds of voters said that they had not yet decided.
The violin was made in Cremona around 1715 and has never been restored.
Please find attached the invoice for October.
In the beginning the universe was hot, dense and nearly uniform.
This film is far too long, but the last twenty minutes are wonderful.
A mutex must be unlocked by the thread that has locked it.
Bananas ripen faster in a bag with an apple.
Under section 12, the tenant may end the contract with a month's notice.
kubectl get pods --all-namespaces | grep -v Running
The bridge sways by design: a rigid one of that length would break.
Her second novel, published in 1987, was translated into thirty languages.
What is the difference between a virus and a bacterium?
Add the vectors component by component, then divide by their number.
Free shipping on all orders over €50!
The glacier has lost a third of its length since it was first measured.
Nobody answered, so he put the letter under the door and left.
GDP grew by 0.3 per cent in the third quarter, revised from 0.1.
Is it safe to eat eggs two weeks after the date on the box?
No
Thank you very much for your quick reply.
Wie komme ich am besten zum Bahnhof?
La bibliothèque ferme à dix-huit heures.
El precio de la vivienda ha subido más que los salarios.
"""

LONG = """
The harbour had been silting up for a century before anybody measured it. Fishermen knew that the channel moved, and
that a boat which cleared the bar in spring might touch it in autumn, but the town paid for a survey only after the
ferry ran aground with two hundred people on board. The report, sixty pages of soundings and tide tables, came to a
simple conclusion: the river brought more sand than the ebb could carry away, and no dredger the town could afford
would change that. What followed was an argument of ten years about whether to build a mole, move the port, or do
nothing at all.

To install the package, create a virtual environment and activate it, then run pip install with the name of the
package and the extra that you need. The command line tool is called with a subcommand and options; every option can
also be given in a configuration file, and those on the command line win. If a download fails, check whether a proxy
is set, and whether its certificate is trusted by the system. Logs are written to the standard error stream, one line
for each event, with the time in UTC, and the level can be raised with the option --verbose. Report a problem with the
version, the operating system and the whole traceback.

Insulin is a hormone that is made in the pancreas and lets cells take up sugar from the blood. In type 1 diabetes the
cells that make it are destroyed by the body's own defences, usually in childhood, and it must be injected for life.
In type 2, which is far more common, the body makes enough of it at first but reacts to it less and less; weight, age
and heredity all play a part, and exercise and diet can hold it back for years. Both damage small vessels if the sugar
stays high, which shows first in the eyes, the kidneys and the feet, and both are checked by a value that tells the
average of the last three months.

The court found that the seller had known of the damp before the contract was signed, since two earlier surveys that
mentioned it were in his files, and that his answer to the buyer's question had therefore been misleading. It did not
matter that the buyer could have found out by himself. The price was reduced by the cost of the repair, which an
expert put at eighteen thousand, and the seller was ordered to pay two thirds of the costs of both instances. Leave to
appeal was refused, because the case raised no question of principle and the facts had been established without error.
"""


def example_tokens(recipe: Recipe) -> tuple[Ints, Ints]:
    """The examples as the model's tokens, end to end, and where each starts."""
    tokenizer = TextTokenizer(recipe, min(LONGEST, recipe.max_length))
    # Long ones first: should there be too many for the layer that looks at them, the short ones have a few to spare.
    passages = [" ".join(passage.split()) for passage in LONG.split("\n\n")]
    ids, starts, _ = tokenizer([*passages, *SHORT.strip().splitlines()])
    return ids, starts

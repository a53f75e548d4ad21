"""Knows the stages from prompt to token, in English and Chinese; does not know how any is computed.

The stage table is the vocabulary of the product: code, traces, command line, docs and explorer read
ids, names, values and explanations from here. `STAGES` is in pipeline order; the dataflow is stated
twice, by the reader (`inputs`) and by the maker (`goes_to`), and both agree.

Shapes are those of one request unless `B` stands in them. Order of ids is order of reading: S6.8
runs before S6.4 in the engine, because a token attends to itself through the cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Language = Literal["en", "zh"]
Phase = Literal["A", "B", "C", "D", "E", "F"]
Role = Literal["prepare", "generate", "deliver"]
Actor = Literal["tokenizer", "model", "engine"]
Effect = Literal["pure", "writes", "random"]
Kind = Literal["str", "int", "float", "object"]

REQUEST = "request"
USER = "user"


@dataclass(frozen=True, slots=True)
class Text:
    """The same words in English and Chinese."""

    en: str
    zh: str

    def pick(self, language: Language) -> str:
        """The words in one language."""
        return {"en": self.en, "zh": self.zh}[language]


@dataclass(frozen=True, slots=True)
class Term:
    """A word and what it means."""

    name: Text
    meaning: Text


@dataclass(frozen=True, slots=True)
class Value:
    """A named value between stages; `shape` in `SYMBOLS`, None where it is not an array."""

    name: str
    shape: str | None
    kind: Kind


@dataclass(frozen=True, slots=True)
class Input:
    """A value that a stage reads, and the stage that made it (or `REQUEST`)."""

    value: Value
    from_stage: str


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table.

    `what` happens, `why` the stage exists (one sentence), and what it is `like` in everyday life.
    `goes_to` holds stage ids, or `USER`. `per_layer` stages run once in each of the L layers.
    """

    id: str
    name: Text
    phase: Phase
    what: Text
    why: Text
    like: Text
    role: Role
    actor: Actor
    inputs: tuple[Input, ...]
    outputs: tuple[Value, ...]
    goes_to: tuple[str, ...]
    effect: Effect
    per_layer: bool


# Phase key to phase name, in pipeline order.
PHASES: Mapping[Phase, Text] = MappingProxyType(
    {
        "A": Text("preprocessing", "预处理"),
        "B": Text("embedding", "嵌入"),
        "C": Text("forward", "前向"),
        "D": Text("head", "输出头"),
        "E": Text("decoding", "解码"),
        "F": Text("the loop", "自回归"),
    }
)

# The letters in shapes.
SYMBOLS: Mapping[str, Text] = MappingProxyType(
    {
        "n": Text(
            "tokens of the prompt; in decode a turn runs over one position, so n is 1 in S4 to S7",
            "提示词的 token 数；生成阶段每轮只处理一个位置，S4 到 S7 中的 n 为 1",
        ),
        "n_max": Text("tokens of the longest prompt in the step", "本步中最长提示词的 token 数"),
        "B": Text("requests in the step", "本步处理的请求数"),
        "d": Text(
            "model width, the length of each token's vector", "模型宽度，即每个 token 的向量维数"
        ),
        "H": Text("query heads", "查询头数"),
        "Hkv": Text("key/value heads", "键/值头数"),
        "dh": Text("head size", "每个头的维数"),
        "f": Text("MLP width", "前馈网络的中间维数"),
        "V": Text(
            "vocabulary size (the value named V in S6.1 is another thing: the value vectors)",
            "词表大小（与 S6.1 中名为 V 的值向量不是一回事）",
        ),
        "L": Text("layers", "层数"),
        "t": Text(
            "tokens so far, prompt and generated", "迄今为止的 token 总数，包括提示词和已生成的部分"
        ),
    }
)

# What a stage is for, as seen by the person who waits for the answer.
ROLES: Mapping[Role, Text] = MappingProxyType(
    {
        "prepare": Text("prepare", "准备"),
        "generate": Text("generate", "生成"),
        "deliver": Text("deliver", "交付"),
    }
)

# Who does the work.
ACTORS: Mapping[Actor, Text] = MappingProxyType(
    {
        "tokenizer": Text("tokenizer", "分词器"),
        "model": Text("model", "模型"),
        "engine": Text("engine", "引擎"),
    }
)

# What a stage leaves behind besides its outputs.
EFFECTS: Mapping[Effect, Term] = MappingProxyType(
    {
        "pure": Term(
            Text("pure", "纯计算"), Text("same input, same output", "输入相同，输出必相同")
        ),
        "writes": Term(Text("writes", "写缓存"), Text("changes the KV cache", "会改动 KV 缓存")),
        "random": Term(
            Text("random", "随机"),
            Text("draws from the request's own random stream", "从请求自己的随机流中抽取随机数"),
        ),
    }
)

# Where values enter and leave the pipeline; used in `from_stage` and `goes_to` beside stage ids.
ENDS: Mapping[str, Text] = MappingProxyType(
    {
        REQUEST: Text("the request", "请求"),
        USER: Text("the user", "用户"),
    }
)

# Values on the main path. One name may carry two shapes: the stage that makes it decides.
_REQUEST = Value("request", None, "object")
_PARAMS = Value("decoding_params", None, "object")
_EMPTY_CACHE = Value("kv_cache", "[2, 0, Hkv, dh]", "float")
_PROMPT = Value("prompt", None, "str")
_TOKENS = Value("tokens", "[n]", "str")
_TOKEN_IDS = Value("token_ids", "[n]", "int")
_PADDED = Value("padded_token_ids", "[B, n_max]", "int")
_MASK = Value("attention_mask", "[B, n_max]", "int")
_X = Value("X", "[n, d]", "float")
_POSITIONS = Value("positions", "[n]", "int")
_Q = Value("Q", "[n, H·dh]", "float")
_K = Value("K", "[n, Hkv·dh]", "float")
_V = Value("V", "[n, Hkv·dh]", "float")
_Q_HEADS = Value("Q_heads", "[n, H, dh]", "float")
_K_HEADS = Value("K_heads", "[n, Hkv, dh]", "float")
_V_HEADS = Value("V_heads", "[n, Hkv, dh]", "float")
_Q_POS = Value("Q_pos", "[n, H, dh]", "float")
_K_POS = Value("K_pos", "[n, Hkv, dh]", "float")
_CACHE = Value("kv_cache", "[2, t, Hkv, dh]", "float")
_SCORES = Value("S_masked", "[H, n, t]", "float")
_WEIGHTS = Value("A", "[H, n, t]", "float")
_O_HEADS = Value("O_heads", "[n, H, dh]", "float")
_X_PRIME = Value("X_prime", "[n, d]", "float")
_X_UPDATED = Value("X_updated", "[n, d]", "float")
_XL = Value("XL", "[n, d]", "float")
_X_LAST = Value("x_last", "[d]", "float")
_H = Value("h", "[d]", "float")
_LOGITS = Value("logits", "[V]", "float")
_ADJUSTED = Value("adjusted_logits", "[V]", "float")
_CANDIDATES = Value("candidate_logits", "[V]", "float")
_PROBS = Value("probs", "[V]", "float")
_U = Value("u", None, "float")
_NEXT = Value("next_token_id", None, "int")
_TEXT = Value("text", None, "str")
_APPENDED = Value("token_ids", "[1]", "int")
_FINISH = Value("finish_reason", None, "str")

STAGES: tuple[Stage, ...] = (
    Stage(
        id="S0",
        name=Text("Initialise", "初始化"),
        phase="A",
        what=Text(
            "Before any arithmetic, the request gets an empty block table for its KV cache and "
            "its effective sampling parameters, each with where it came from (request, command "
            "line, model, engine).",
            "任何计算开始之前，先为请求建立一张空的 KV 缓存块表，并确定实际生效的采样参数，"
            "逐项注明来源（请求、命令行、模型或引擎）。",
        ),
        why=Text(
            "No later stage should have to guess a setting: all are decided once, before the "
            "first token, and can be looked up.",
            "后面的阶段不必再猜测任何设置：所有参数在第一个 token 之前一次定好，随时可查。",
        ),
        like=Text(
            "Before a kitchen starts to cook, it reads the whole order, fills in the house's "
            "usual choice where the guest left something open, and clears a shelf for it.",
            "好比后厨开火之前先看完整张点单：客人没写明的按店里的惯例定下，"
            "再为这一单腾出一格空架子。",
        ),
        role="prepare",
        actor="engine",
        inputs=(Input(_REQUEST, REQUEST),),
        outputs=(_PARAMS, _EMPTY_CACHE),
        goes_to=("S6.8", "S10", "S11", "S12", "S13"),
        effect="writes",
        per_layer=False,
    ),
    Stage(
        id="S1",
        name=Text("Tokenize", "切分"),
        phase="A",
        what=Text(
            "The tokenizer's rule (BPE, Unigram, WordPiece) cuts the prompt text into pieces; for "
            "a chat, the template is rendered first.",
            "分词器按自己的规则（BPE、Unigram 或 WordPiece）把提示词切成片段，即 token；"
            "对话请求要先套用对话模板，渲染成一段完整的文本。",
        ),
        why=Text(
            "A model knows only a fixed list of pieces; cutting any text into pieces of that list "
            "lets it read words that it has never met whole.",
            "模型只认识一份固定的片段表；把任意文本都切成表中的片段，"
            "从未完整见过的词也就能读进来。",
        ),
        like=Text(
            "Like a box of rubber stamps: a common word has a stamp of its own, a rare one is put "
            "together from several smaller ones.",
            "像一盒字词印章：常用词有现成的一枚，生僻词就用几枚小的拼出来。",
        ),
        role="prepare",
        actor="tokenizer",
        inputs=(Input(_PROMPT, REQUEST),),
        outputs=(_TOKENS,),
        goes_to=("S2",),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S2",
        name=Text("Look up ids", "查词表"),
        phase="A",
        what=Text(
            "Every piece becomes its integer in the vocabulary.",
            "每个片段换成它在词表中的整数编号。",
        ),
        why=Text(
            "Arithmetic needs numbers, and this number is also the row of the embedding table at "
            "which the piece's vector is kept.",
            "计算只认数字，而这个编号同时也是该片段的向量在词嵌入表中的行号。",
        ),
        like=Text(
            "Like the shelf mark of a library book: it says nothing about the content, only where "
            "to fetch it.",
            "好比图书馆的索书号：号码不说明书的内容，只告诉你到哪里去取。",
        ),
        role="prepare",
        actor="tokenizer",
        inputs=(Input(_TOKENS, "S1"),),
        outputs=(_TOKEN_IDS,),
        goes_to=("S3", "S4", "S10"),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S3",
        name=Text("Pad and mask", "填充与掩码"),
        phase="A",
        what=Text(
            "Several requests are laid side by side; short ones are padded with the pad id, and a "
            "0/1 mask says what is real. With one request nothing is padded. A ragged batch keeps "
            "row starts and lengths instead, and shows the mask that means the same.",
            "把多个请求并排放成一个矩形：短的用填充 id 补齐，"
            "并用 0/1 掩码标明哪些位置是真实的 token。只有一个请求时无需填充。"
            "变长批（ragged batch）不填充，只记录每行的起点和长度，并给出等价的掩码供查看。",
        ),
        why=Text(
            "Requests can share one pass over the weights only if the arithmetic knows where each "
            "of them begins and ends.",
            "多个请求要共享同一次权重读取，计算时就必须分清每个请求从哪里开始、到哪里结束。",
        ),
        like=Text(
            "Like a form with a fixed number of boxes per line: a short name leaves some empty, "
            "and those are crossed out so that nobody reads them as part of it.",
            "像每行格数固定的表格：名字短就会剩下几格，把它们划掉，就不会有人误当成名字的一部分。",
        ),
        role="prepare",
        actor="engine",
        inputs=(Input(_TOKEN_IDS, "S2"),),
        outputs=(_PADDED, _MASK),
        goes_to=("S4", "S6.4"),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S4",
        name=Text("Embed", "词嵌入"),
        phase="B",
        what=Text(
            "Each id picks its row of the embedding table.",
            "每个 id 从词嵌入表中取出自己那一行向量。",
        ),
        why=Text(
            "An id is only a label; its row of d learned numbers is something to compute with, "
            "and pieces that are used alike tend to have similar rows.",
            "id 只是代号，数值大小没有意义；训练得到的 d 维向量才能参与计算，用法相近的片段，"
            "向量往往也相近。",
        ),
        like=Text(
            "Like looking up the coordinates of a town: two names say nothing about how far apart "
            "the towns are, two pairs of coordinates do.",
            "好比由地名查到经纬度：光看两个地名不知道相距多远，看坐标就知道了。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_TOKEN_IDS, "S2"), Input(_PADDED, "S3"), Input(_APPENDED, "S13")),
        outputs=(_X,),
        goes_to=("S5",),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S5",
        name=Text("Positions", "位置"),
        phase="B",
        what=Text(
            "Every token gets its position, counted from 0. Learned or sinusoidal tables are "
            "added to X here; RoPE and ALiBi leave X as it is and act in S6.3 and S6.4.",
            "给每个 token 编上从 0 开始的位置序号。可学习的或正弦式的位置表在这里加到 X 上；"
            "RoPE 和 ALiBi 不改动 X，分别在 S6.3 和 S6.4 起作用。",
        ),
        why=Text(
            "The dot products of attention carry no order of their own; positions let the model "
            "tell 'dog bites man' from 'man bites dog'.",
            "注意力的点积本身不含先后次序；有了位置信息，模型才能可靠地区分“狗咬人”和“人咬狗”。",
        ),
        like=Text(
            "Like numbering the pages of a manuscript: should the pile fall down, the order is "
            "not lost.",
            "像给一叠手稿编页码：就算散落一地，顺序也不会丢。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_X, "S4"),),
        outputs=(_X, _POSITIONS),
        goes_to=("S6", "S6.3", "S6.4"),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S6",
        name=Text("Transformer layers", "逐层前向"),
        phase="C",
        what=Text(
            "A loop over the L layers: each has its own weights, runs S6.1 to S6.8 and hands the "
            "updated hidden state to the next. X is what enters a layer, XL what leaves the last "
            "one.",
            "依次经过 L 层：每层用自己的权重执行 S6.1 到 S6.8，把更新后的隐藏状态交给下一层。"
            "进入每一层的状态记作 X，离开最后一层的记作 XL。",
        ),
        why=Text(
            "One layer can gather and transform information only once; in a stack, later layers "
            "build on what earlier ones have worked out.",
            "单独一层只能做一轮信息的汇集与变换；层层叠加，后面的层才能在前面的结果上继续加工。",
        ),
        like=Text(
            "Like a draft that passes through a row of editors: each reads what is there, adds "
            "notes, and passes all of it on, the original included.",
            "像一份稿子依次经过一排编辑：每位先读已有的内容，添上自己的批注，"
            "再连同原文一起往下传。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_X, "S5"), Input(_X_UPDATED, "S6.7")),
        outputs=(_X, _XL),
        goes_to=("S6.1", "S6.6", "S7"),
        effect="writes",
        per_layer=False,
    ),
    Stage(
        id="S6.1",
        name=Text("Norm and project", "归一化与投影"),
        phase="C",
        what=Text(
            "The layer's input is normalised (pre-norm: RMSNorm or LayerNorm), then three "
            "projections make queries Q, keys K and values V.",
            "先对本层输入做归一化（前置归一化：RMSNorm 或 LayerNorm），再经三个投影得到查询 Q、"
            "键 K 和值 V。",
        ),
        why=Text(
            "Attention needs three things of every token, what it looks for (Q), what it is found "
            "by (K) and what it hands over (V), and the norm keeps their scale steady through "
            "many layers.",
            "注意力需要每个 token 的三样东西：要找什么（Q）、凭什么被找到（K）、"
            "找到后交出什么（V）；归一化则让数值尺度在多层之间保持平稳。",
        ),
        like=Text(
            "Like an archive: somebody comes with a question (Q), every folder bears a label (K), "
            "and in the folder lies its content (V).",
            "好比查档案：来人带着问题（Q），每个卷宗贴着标签（K），卷宗里装着内容（V）。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_X, "S6"),),
        outputs=(_Q, _K, _V),
        goes_to=("S6.2",),
        effect="pure",
        per_layer=True,
    ),
    Stage(
        id="S6.2",
        name=Text("Split heads", "拆成多头"),
        phase="C",
        what=Text(
            "Rows are reshaped so that every head works alone on its dh numbers; in grouped-query "
            "models several query heads share one key/value head.",
            "重排每行数据，让每个头独立处理自己的 dh 个数；分组查询注意力（GQA）模型中，"
            "多个查询头共用一个键/值头。",
        ),
        why=Text(
            "Several heads can attend to different things at the same time, where a single large "
            "head would blend them into one pattern.",
            "多个头可以同时关注不同的对象；若只有一个大头，它们就会混成同一种注意力分布。",
        ),
        like=Text(
            "Like several people who read the same page, each with an eye for something else; "
            "nobody tells a head what to look for, training settles it.",
            "像几个人同读一页书，各自留意不同的东西；只是每个头留意什么并非由人指定，"
            "而是训练出来的。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_Q, "S6.1"), Input(_K, "S6.1"), Input(_V, "S6.1")),
        outputs=(_Q_HEADS, _K_HEADS, _V_HEADS),
        goes_to=("S6.3", "S6.5", "S6.8"),
        effect="pure",
        per_layer=True,
    ),
    Stage(
        id="S6.3",
        name=Text("Rotate", "旋转位置编码"),
        phase="C",
        what=Text(
            "RoPE turns Q and K by an angle that grows with position, at another speed for each "
            "pair of numbers; V is left alone. Models without RoPE skip it: Q_pos and K_pos are "
            "then Q_heads and K_heads.",
            "RoPE 把 Q 和 K 旋转一个随位置增大的角度，每对分量的转速各不相同；V 不动。"
            "不用 RoPE 的模型跳过这一步，此时 Q_pos、K_pos 就是 Q_heads、K_heads。",
        ),
        why=Text(
            "After the turn, position enters the dot product of a query and a key only through "
            "the distance between them, so a relation such as 'two words back' is learned once "
            "for all places.",
            "旋转之后，位置对查询与键的点积的影响只取决于两者的距离，"
            "因此“往前数第二个词”这类关系学会一次，放到哪里都适用。",
        ),
        like=Text(
            "Like two equal clocks that were started at different moments: at any hour, the angle "
            "between their hands shows how far apart the starts were.",
            "像两只走速相同、先后启动的钟：无论何时去看，指针之间的夹角都反映启动时刻相差多久。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_Q_HEADS, "S6.2"), Input(_K_HEADS, "S6.2"), Input(_POSITIONS, "S5")),
        outputs=(_Q_POS, _K_POS),
        goes_to=("S6.4", "S6.8"),
        effect="pure",
        per_layer=True,
    ),
    Stage(
        id="S6.4",
        name=Text("Masked scores", "掩码分数"),
        phase="C",
        what=Text(
            "Dot products of queries and keys over √dh (plus ALiBi bias, soft cap, window where "
            "the model has them); the future and the padding become −∞. Keys of earlier tokens "
            "come from the KV cache, and in the engine those of the current tokens as well.",
            "查询与键做点积，再除以 √dh（模型若有 ALiBi 偏置、soft cap 或滑动窗口，"
            "也在这里施加）；未来的位置和填充位置置为 −∞。先前 token 的键取自 KV 缓存；在引擎中，"
            "当前 token 的键同样从缓存读取。",
        ),
        why=Text(
            "A score says how much a token should heed each token before it, and the mask keeps "
            "it from reading ahead, since while generating there is nothing ahead to read.",
            "分数表示一个 token 对它前面各个 token 应关注多少；掩码让它看不到后文，"
            "因为生成时后文还不存在。",
        ),
        like=Text(
            "Like grading how well each folder's label fits the question, with the folders that "
            "are not yet filed left out of it.",
            "像逐个打分，看卷宗标签与问题有多吻合；尚未归档的卷宗不参与评分。",
        ),
        role="generate",
        actor="model",
        inputs=(
            Input(_Q_POS, "S6.3"),
            Input(_K_POS, "S6.3"),
            Input(_POSITIONS, "S5"),
            Input(_MASK, "S3"),
            Input(_CACHE, "S6.8"),
        ),
        outputs=(_SCORES,),
        goes_to=("S6.5",),
        effect="pure",
        per_layer=True,
    ),
    Stage(
        id="S6.5",
        name=Text("Weigh the values", "加权聚合"),
        phase="C",
        what=Text(
            "A softmax over each row turns scores into weights that sum to 1; then comes the "
            "weighted sum of V, which is read from the cache as K is in S6.4.",
            "对每行分数做 softmax，得到和为 1 的权重，再对 V 加权求和；"
            "V 与 S6.4 中的 K 一样从缓存读取。",
        ),
        why=Text(
            "This is the one place in the model where information passes from one token to "
            "another.",
            "整个模型中，信息只在这里从一个 token 流向另一个 token。",
        ),
        like=Text(
            "Like a summary in which every source gets room by how well it fits the question: the "
            "best fit the most, a poor fit next to none.",
            "像写综述：与问题越契合的材料占的篇幅越大，不相干的几乎一笔带过。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_SCORES, "S6.4"), Input(_V_HEADS, "S6.2"), Input(_CACHE, "S6.8")),
        outputs=(_WEIGHTS, _O_HEADS),
        goes_to=("S6.6",),
        effect="pure",
        per_layer=True,
    ),
    Stage(
        id="S6.6",
        name=Text("Project and add", "输出投影与残差"),
        phase="C",
        what=Text(
            "The heads are joined, projected back to d, and added to the layer's input.",
            "把各个头的输出拼接起来，投影回 d 维，再与本层输入相加。",
        ),
        why=Text(
            "The projection combines what the heads have found, and the addition keeps what was "
            "there before, so that a layer has to learn only the change.",
            "投影把各个头的所得合到一起，残差相加则保留原有信息，这样每层只需学习“要改动什么”。",
        ),
        like=Text(
            "Like a committee that clips one joint note to a file instead of writing the file "
            "anew.",
            "像几位委员合写一张意见条附在卷宗上，而不是把卷宗重写一遍。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_O_HEADS, "S6.5"), Input(_X, "S6")),
        outputs=(_X_PRIME,),
        goes_to=("S6.7",),
        effect="pure",
        per_layer=True,
    ),
    Stage(
        id="S6.7",
        name=Text("MLP and add", "前馈与残差"),
        phase="C",
        what=Text(
            "Norm, projection up to f, activation (SwiGLU, GEGLU, GELU), projection down to d, "
            "and added again. The result enters the next layer; after the last layer it is XL and "
            "goes on to S7.",
            "归一化，升维到 f，经激活函数（SwiGLU、GEGLU 或 GELU），再降维回 d，并再次残差相加。"
            "结果进入下一层；若已是最后一层，它就是 XL，送往 S7。",
        ),
        why=Text(
            "Attention carries information between tokens, while the MLP works on each token alone,"
            " and its non-linear step makes combinations that no weighted sum can.",
            "注意力在 token 之间传递信息，前馈网络则逐个 token 单独加工，"
            "其中的非线性能表达加权求和做不到的组合。",
        ),
        like=Text(
            "Like the hour after a meeting, when everyone is back at their own desk and works "
            "through what they noted down.",
            "像开完会后各自回到工位，独自消化会上记下的内容。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_X_PRIME, "S6.6"),),
        outputs=(_X_UPDATED,),
        goes_to=("S6",),
        effect="pure",
        per_layer=True,
    ),
    Stage(
        id="S6.8",
        name=Text("Write the KV cache", "写入KV缓存"),
        phase="C",
        what=Text(
            "The layer's K (after rotation) and V are stored for all later tokens; in the engine "
            "it happens before S6.4, since a token also attends to itself through the cache.",
            "把本层的 K（旋转之后）和 V 存下来，供后续所有 token 使用；在引擎中，"
            "这一步先于 S6.4 执行，因为 token 对自身的注意力也经由缓存读取。",
        ),
        why=Text(
            "K and V of a past token never change, so keeping them saves working through the "
            "whole text again for every new token.",
            "已处理 token 的 K 和 V 不会再变，存下来，"
            "每生成一个新 token 就不必把整段文本重算一遍。",
        ),
        like=Text(
            "Like the minutes of a meeting: whoever speaks next reads them, and nobody has to say "
            "everything again.",
            "像会议记录：接着发言的人翻看记录即可，不必请大家把话从头再说一遍。",
        ),
        role="generate",
        actor="engine",
        inputs=(Input(_K_POS, "S6.3"), Input(_V_HEADS, "S6.2"), Input(_EMPTY_CACHE, "S0")),
        outputs=(_CACHE,),
        goes_to=("S6.4", "S6.5"),
        effect="writes",
        per_layer=True,
    ),
    Stage(
        id="S7",
        name=Text("Take the last position", "取末位"),
        phase="D",
        what=Text(
            "Only the newest position is kept, since only it predicts the next token.",
            "只保留最新的一个位置，因为只有它用来预测下一个 token。",
        ),
        why=Text(
            "Every position predicts the token after it, and all of these but the last are known "
            "already, so n − 1 products with the large vocabulary matrix are saved.",
            "每个位置预测的都是紧随其后的 token，除末位之外答案都已知，"
            "舍去它们就省下了 n − 1 次与庞大词表矩阵的乘法。",
        ),
        like=Text(
            "Like finishing somebody's sentence: you have listened to all of it, but you go on "
            "only from where it broke off.",
            "像接别人的话：整句都听进去了，但只从他停下的地方往下接。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_XL, "S6"),),
        outputs=(_X_LAST,),
        goes_to=("S8",),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S8",
        name=Text("Final norm", "末端归一化"),
        phase="D",
        what=Text(
            "A last RMSNorm or LayerNorm brings the vector to the scale that the head expects.",
            "最后再做一次 RMSNorm 或 LayerNorm，把向量调整到输出头所预期的尺度。",
        ),
        why=Text(
            "Every layer has added to the vector, and without the norm its accumulated length "
            "would decide how far apart the scores lie.",
            "每一层都往向量上累加，若不归一化，分数之间的差距就会由累积的长度决定。",
        ),
        like=Text(
            "Like setting the level before a recording: a loud and a quiet voice are brought to "
            "the same volume, and what differs is what they say.",
            "像录音前校准电平：声音大的小的都调到同一音量，剩下的差别只在说了什么。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_X_LAST, "S7"),),
        outputs=(_H,),
        goes_to=("S9",),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S9",
        name=Text("LM head", "词表投影"),
        phase="D",
        what=Text(
            "One product with the vocabulary matrix gives one score (logit) per vocabulary entry, "
            "not yet a probability.",
            "与词表矩阵做一次乘法，为词表中的每一项给出一个分数（logit），此时还不是概率。",
        ),
        why=Text(
            "Up to here the model has worked on vectors; this is where a vector becomes a verdict "
            "on every token that could come next.",
            "到此为止模型处理的都是向量，这一步才把向量变成对每个可能的下一个 token 的评分。",
        ),
        like=Text(
            "Like a jury that marks every contestant, the hopeless ones too; the marks alone have "
            "not yet made a winner.",
            "像评委给每位选手打分，没有希望的也不漏；分数出来了，但还没有宣布谁胜出。",
        ),
        role="generate",
        actor="model",
        inputs=(Input(_H, "S8"),),
        outputs=(_LOGITS,),
        goes_to=("S10",),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S10",
        name=Text("Adjust", "调整分数"),
        phase="E",
        what=Text(
            "In this order: bans (allowed ids, bad words, min tokens), logit bias, repetition, "
            "presence and frequency penalties, temperature. Penalties look at the tokens so far.",
            "依次施加：禁用规则（允许的 id、禁用词、最少 token 数）、logit 偏置、重复惩罚、"
            "存在惩罚与频率惩罚、温度。各项惩罚要参照已有的 token。",
        ),
        why=Text(
            "Here the wishes of the request meet the scores of the model: what must not come, "
            "what should come less often, and how bold the choice may be.",
            "请求的要求在这里作用于模型的分数：什么不许出现，什么少出现，选择可以放开到什么程度。",
        ),
        like=Text(
            "Like an editor who goes over a list of suggestions with the house rules: some are "
            "struck out, repeated ones lose marks, and the gaps between the marks are stretched "
            "or shrunk.",
            "像编辑按编辑部的规范过一遍候选清单：有的划掉，重复的减分，最后把分差整体拉大或压小。",
        ),
        role="generate",
        actor="engine",
        inputs=(
            Input(_LOGITS, "S9"),
            Input(_PARAMS, "S0"),
            Input(_TOKEN_IDS, "S2"),
            Input(_APPENDED, "S13"),
        ),
        outputs=(_ADJUSTED,),
        goes_to=("S11",),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S11",
        name=Text("Truncate", "截断候选"),
        phase="E",
        what=Text(
            "Top-k, top-p, min-p, typical, in this order, each on what the one before has left; "
            "what falls out becomes −∞.",
            "依次应用 top-k、top-p、min-p、typical，每一步只看上一步留下的候选；被淘汰的置为 −∞。",
        ),
        why=Text(
            "The vocabulary has a long tail of unlikely tokens whose small probabilities add up, "
            "and without the tail no draw can land there.",
            "词表有一条由低概率 token 组成的长尾，单个概率虽小，加起来却不可忽视，截掉长尾，"
            "抽样就不会落到那里。",
        ),
        like=Text(
            "Like a shortlist: out of all applicants only the most promising are invited, and the "
            "choice is made among them.",
            "像招聘时的初筛名单：只约见最有希望的几位，最后从他们当中选定。",
        ),
        role="generate",
        actor="engine",
        inputs=(Input(_ADJUSTED, "S10"), Input(_PARAMS, "S0")),
        outputs=(_CANDIDATES,),
        goes_to=("S12",),
        effect="pure",
        per_layer=False,
    ),
    Stage(
        id="S12",
        name=Text("Choose and detokenize", "选取与还原"),
        phase="E",
        what=Text(
            "Greedy takes the highest score and draws nothing; sampling is a softmax, then one "
            "draw u. The id becomes text, which is held back while a character or a possible stop "
            "string is incomplete.",
            "贪心取分数最高的一个，不抽随机数；采样则先做 softmax，再抽一个随机数 u 来选定。"
            "选中的 id 还原成文本；字符不完整或可能是停止串的开头时，先暂缓输出。",
        ),
        why=Text(
            "The model gives only probabilities, so one token has to be settled on, and a person "
            "wants to read text, not an id.",
            "模型只给出概率，总要有一步选定一个 token，而人要读的是文字，不是编号。",
        ),
        like=Text(
            "Like spinning a wheel whose slices are as wide as their probabilities (greedy simply "
            "takes the widest), then reading out what the slice says.",
            "像转一个转盘，每格的宽度就是它的概率（贪心则直接取最宽的一格），"
            "停下后念出格子里的字。",
        ),
        role="deliver",
        actor="engine",
        inputs=(Input(_CANDIDATES, "S11"), Input(_PARAMS, "S0")),
        outputs=(_PROBS, _U, _NEXT, _TEXT),
        goes_to=("S13", USER),
        effect="random",
        per_layer=False,
    ),
    Stage(
        id="S13",
        name=Text("Append and repeat", "追加循环"),
        phase="F",
        what=Text(
            "The token joins the sequence and one position (not n) runs through S4–S12, reading "
            "the KV cache, until an end token, a stop string or the token limit.",
            "新 token 追加到序列末尾，只有这一个位置（而不是 n 个）再走一遍 S4–S12，"
            "前文从 KV 缓存读取；直到出现结束 token、停止串，或达到 token 数上限。",
        ),
        why=Text(
            "The model predicts one token at a time, and a text comes about only because each "
            "token is fed back as input for the next.",
            "模型一次只预测一个 token，把每个新 token 再作为输入送回去，才能连成一段文本。",
        ),
        like=Text(
            "Like writing a letter word by word, each with all the earlier ones in view, until it "
            "is finished or the sheet is full.",
            "像一个词一个词地写信，落笔时通观前文，直到写完，或者信纸写满。",
        ),
        role="generate",
        actor="engine",
        inputs=(Input(_NEXT, "S12"), Input(_TEXT, "S12"), Input(_PARAMS, "S0")),
        outputs=(_APPENDED, _FINISH),
        goes_to=("S4", "S10", USER),
        effect="writes",
        per_layer=False,
    ),
)

# The two ways in which the stages run, how they are timed, and what they cost.
NOTES: Mapping[str, Term] = MappingProxyType(
    {
        "prefill": Term(
            Text("Prefill", "预填充"),
            Text(
                "S1–S12 over all n prompt tokens at once: matrix × matrix, bound by arithmetic; "
                "its end is the first token.",
                "对全部 n 个提示词 token 一次执行 S1–S12：矩阵乘矩阵，受算力限制；"
                "结束时产生第一个 token。",
            ),
        ),
        "decode": Term(
            Text("Decode", "生成"),
            Text(
                "Every later turn of S13: vector × matrix, bound by memory bandwidth.",
                "此后 S13 的每一轮循环：向量乘矩阵，受内存带宽限制。",
            ),
        ),
        "ttft": Term(
            Text("TTFT (time to first token)", "首 token 延迟（TTFT）"),
            Text(
                "From the text's arrival (before S1) to the first token's text; loading the model "
                "is not part of it.",
                "从文本到达（S1 之前）到第一个 token 的文本产生为止；不包括加载模型的时间。",
            ),
        ),
        "tpot": Term(
            Text("TPOT (time per output token)", "每输出 token 耗时（TPOT）"),
            Text(
                "(time of the last token − time of the first token) / (tokens − 1); there is none "
                "for a single token.",
                "（最后一个 token 的时刻 − 第一个 token 的时刻）/（token 数 − 1）；"
                "只有一个 token 时没有此值。",
            ),
        ),
        "itl": Term(
            Text("ITL (inter-token latency)", "token 间延迟（ITL）"),
            Text(
                "Each single gap between one token and the next; the mean of a request's gaps is "
                "its TPOT.",
                "相邻两个 token 之间的每一次间隔；一个请求所有间隔的平均值就是它的 TPOT。",
            ),
        ),
        "cost": Term(
            Text("Cost", "开销"),
            Text(
                "The cost of a layer's scores at prefill grows with n²; in decode each token "
                "costs one pass over the weights plus one pass over the cached K and V, which "
                "grows with t.",
                "预填充时，每层注意力分数的开销随 n² 增长；生成时，每个 token 要读一遍权重，"
                "再读一遍缓存中的 K 和 V，后者随 t 增长。",
            ),
        ),
    }
)

# Words that other texts use differently.
WORDS: tuple[Term, ...] = (
    Term(
        Text("top-p", "top-p（核采样）"),
        Text(
            "Some texts call it TopN or nucleus sampling.",
            "有些资料称之为 TopN 或 nucleus sampling。",
        ),
    ),
    Term(
        Text("top-k", "top-k（前 k 采样）"),
        Text(
            "Sometimes called greedy, which it is only for k = 1.",
            "有时被称作贪心解码，其实只有 k = 1 时才是。",
        ),
    ),
    Term(
        Text("decoding_params", "解码参数 decoding_params"),
        Text("It is SamplingParams in the code.", "在代码中对应 SamplingParams。"),
    ),
)


STAGE: Mapping[str, Stage] = MappingProxyType({stage.id: stage for stage in STAGES})

_STAGE_ID = re.compile(r"S(0|[1-9][0-9]{0,3})(?:\.([1-9][0-9]{0,3}))?")


def stage_sort_key(stage_id: str) -> tuple[int, int]:
    """Sorting key of a stage id, so that S6 < S6.8 < S7 < S10.

    Raises ValueError for a string that has not the form of a stage id.
    """
    match = _STAGE_ID.fullmatch(stage_id)
    if match is None:
        raise ValueError(f"{stage_id[:80]!r} is not a stage id; expected a form like S6 or S6.8")
    return int(match[1]), int(match[2] or 0)


def stage_of_value(name: str) -> Stage:
    """The first stage that makes the value; for what comes with the request, the first reader.

    Later makers of the same name (X, kv_cache, token_ids) change or extend what the first one made.
    Raises LookupError for a name that no stage makes or reads.
    """
    for stage in STAGES:
        if any(value.name == name for value in stage.outputs):
            return stage
    for stage in STAGES:
        if any(read.value.name == name and read.from_stage == REQUEST for read in stage.inputs):
            return stage
    raise LookupError(f"no stage makes or reads a value named {name[:80]!r}")

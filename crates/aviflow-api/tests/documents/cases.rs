//! Bad documents by group. Each is what somebody would write in good faith, or a file that is none.

/// A group of cases: its name, and each case's name and text.
pub type Group = (&'static str, &'static [(&'static str, &'static str)]);

pub const GROUPS: &[Group] = &[
    ("syntax", SYNTAX),
    ("keys", KEYS),
    ("types", TYPES),
    ("values", VALUES),
    ("together", TOGETHER),
    ("run", RUN),
    ("wiring", WIRING),
];

const SYNTAX: &[(&str, &str)] = &[
    ("empty", "# nothing yet\n"),
    ("tab", "name: a\nresources:\n\tshm: 1Gi\nrun: python a.py\n"),
    ("colon in a value", "name: a\nrun: echo step: 1\n"),
    ("open quote", "name: a\nrun: \"python train.py\nnodes: 2\n"),
    ("text after a quote", "name: a\nrun: \"python\" train.py\n"),
    ("bad escape", "name: a\nrun: \"python C:\\path\"\n"),
    ("open list", "name: a\nrun: [python, train.py\nnodes: 2\n"),
    ("bad indentation", "name: a\n  run: python a.py\n nodes: 2\n"),
    ("line without key", "name: a\nrun python a.py\n"),
    ("star", "name: a\nrun: python a.py\noutputs: [*.pt]\n"),
    ("percent", "name: a\nrun: %run\n"),
    ("two documents", "name: a\nrun: python a.py\n---\nname: b\nrun: python b.py\n"),
    ("duplicate key", "name: a\nrun: python a.py\nnodes: 2\nqueue: x\nnodes: 4\n"),
    ("duplicate variable", "name: a\nrun: python a.py\nenv:\n  LR: 1\n  LR: 2\n"),
    ("merge key", "name: a\nrun: python a.py\nenv: &e {A: 1}\nsecrets:\n  <<: *e\n"),
    ("unknown alias", "name: a\nrun: *command\n"),
    ("alias of itself", "name: a\nrun: python a.py\nenv: &e\n  A: *e\n"),
    ("tag", "name: a\nrun: !reference [x]\n"),
    ("a list", "- name: a\n- run: python a.py\n"),
    ("a word", "python train.py\n"),
    ("key is a list", "name: a\nrun: python a.py\nenv:\n  {{ PORT }}: 1\n"),
];

const KEYS: &[(&str, &str)] = &[
    ("misspelled", "name: a\nrnu: python a.py\nnode: 2\nprioritty: high\n"),
    (
        "of other systems",
        "name: a\ncommand: python a.py\ngpus: 8\nnum_nodes: 2\nretries: 3\ntimeout: 2h\nenvs: {A: 1}\nimage_name: x\n",
    ),
    ("snake case", "name: a\nrun: python a.py\ngpus_per_node: 8\ntime_limit: 2h\n"),
    ("nobody's", "name: a\nrun: python a.py\ncolour: blue\n"),
    ("nested", "name: a\nrun: python a.py\ncheckpoint: {dir: /c, evry: 5m, timeLimit: 2h}\nresources: {memory: 1Gi}\n"),
    ("missing", "queue: nlp\n"),
    (
        "missing in a list",
        "name: a\nrun: python a.py\ndata:\n  - name: x\n  - source: s3://b/c\nafter: [{on: failed}]\ncheckpoint: {every: 5m}\n",
    ),
    ("without value", "name:\nrun: python a.py\nqueue: ~\nenv:\n  DEBUG:\noutputs: [/a, ]\nafter: null\n"),
    ("code without ref", "name: a\nrun: python a.py\ncode: {git: https://git.example/x}\n"),
];

const TYPES: &[(&str, &str)] = &[
    ("text for number", "name: a\nrun: python a.py\nnodes: two\ngpusPerNode: \"8\"\nseed: 1.5\n"),
    ("number for text", "name: 123\nrun: python a.py\nqueue: true\n"),
    ("yes for true", "name: a\nrun: python a.py\npreemptible: yes\ndata: [{name: x, source: /x, readOnly: off}]\n"),
    ("word for list", "name: a\nrun: python a.py\noutputs: /out\nafter: tokenize\n"),
    ("list for mapping", "name: a\nrun: python a.py\nenv: [A=1]\nretry: 3\ncheckpoint: /c\ntopology: [leaf]\n"),
    ("mapping for word", "name: {a: b}\nrun: {python: a.py}\nnodes: [1, 2]\n"),
    (
        "numbers out of range",
        "name: a\nrun: python a.py\nnodes: 0\ngpusPerNode: 128\nseed: -1\nretry: {failures: -2}\ncheckpoint: {path: /c, keep: 0}\nresources: {cpuPerGpu: 0}\n",
    ),
    ("great seed", "name: a\nrun: python a.py\nseed: 9223372036854775808\n"),
    (
        "words",
        "name: a\nrun: python a.py\nprocesses: per_gpu\nafter: [{job: b, on: success}]\nnotify: [{webhook: https://h/x, on: [fail, finished, idle, idle]}]\n",
    ),
    ("empty lists", "name: a\nrun: []\ngpuType: []\nnotify: [{webhook: https://h/x, on: []}]\n"),
];

const VALUES: &[(&str, &str)] = &[
    (
        "too many",
        "name: a\nrun: x\nnotify: [{webhook: &w https://a.example, on: [failed]}, &n {webhook: *w, on: [failed]}, *n, *n, *n, *n, *n, *n, *n, *n, *n, *n, *n, *n, *n, *n, *n]\n",
    ),
    (
        "too long",
        "name: a\nrun: x\ntimeLimit: 00000000000000000000000000000000000000000000000000000000000000000000000000000000000001h\ndata: [{name: a, source: /a, mount: /aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa}]\n",
    ),
    ("name too long", "name: a-name-that-says-everything-about-the-training-and-more\nrun: python a.py\n"),
    ("name with capitals", "name: Llama3_8B.sft\nrun: python a.py\n"),
    ("queue by path", "name: a\nrun: python a.py\nqueue: research/nlp\n"),
    ("priority", "name: a\nrun: python a.py\npriority: hgih\n"),
    ("priority as number", "name: a\nrun: python a.py\npriority: 100\n"),
    ("image with a wrong tag", "name: a\nrun: python a.py\nimage: host.example:5000/team/train:v 1\n"),
    ("image as address", "name: a\nrun: python a.py\nimage: https://host.example/team/train:v1\n"),
    ("image with half a digest", "name: a\nrun: python a.py\nimage: team/train@sha256:abc123\n"),
    ("image as environment", "name: a\nrun: python a.py\nenvironment: team/train:v1\n"),
    ("environment version", "name: a\nrun: python a.py\nenvironment: torch-2.9@latest\n"),
    (
        "durations",
        "name: a\nrun: python a.py\ntimeLimit: 24\ncheckpoint: {path: /c, every: 15 minutes}\ntopology: {prefer: leaf, maxWait: 0s}\n",
    ),
    ("long duration", "name: a\nrun: python a.py\ntimeLimit: 9999d\n"),
    ("quantities", "name: a\nrun: python a.py\nresources: {memoryPerGpu: 200GB, shm: 64}\n"),
    (
        "paths",
        "name: a\nrun: python a.py\noutputs: [out, /, /a/../b, /dev/shm]\nrequirements: ../x.lock\ncheckpoint: {path: ./ckpt}\n",
    ),
    ("variables", "name: a\nrun: python a.py\nenv: {my-var: 1, 2ND: x}\n"),
    (
        "secret by value",
        "name: a\nrun: python a.py\nsecrets:\n  HF_TOKEN: hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh\n  OTHER: password123\n",
    ),
    (
        "key in env",
        "name: a\nrun: python a.py --token hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh\nenv:\n  WANDB_API_KEY: 0123456789abcdef0123\n",
    ),
    ("webhook", "name: a\nrun: python a.py\nnotify: [{webhook: chat.example/x, on: [failed]}]\n"),
    ("repeated type", "name: a\nrun: python a.py\ngpuType: [H100, H200, H100]\n"),
    ("unicode", "name: größe\nrun: python a.py\nenv: {ÜBER: 1}\nqueue: 研究\n"),
    ("windows line ends", "name: a\r\nrun: python a.py\r\nnodes: none\r\n"),
];

const TOGETHER: &[(&str, &str)] = &[
    (
        "image and environment",
        "name: a\nrun: python a.py\nenvironment: minimal\nimage: t@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\nrequirements: x.lock\n",
    ),
    ("requirements alone", "name: a\nrun: python a.py\nrequirements: x.lock\n"),
    ("waiting for nothing", "name: a\nrun: python a.py\ntopology: {require: spine, maxWait: 5m}\n"),
    (
        "several nodes in one",
        "name: a\nrun: python a.py\nnodes: 2\ngpusPerNode: 8\ntopology: {require: node, prefer: node}\n",
    ),
    ("min above max", "name: a\nrun: python a.py\ngpusPerNode: 8\nnodes: {min: 8, max: 2}\n"),
    ("itself", "name: a\nrun: python a.py\nafter: [{job: a}, {job: b}, {job: b, on: failed}]\n"),
    ("data twice", "name: a\nrun: python a.py\ndata: [{name: x, source: /x}, {name: x, source: /y}]\n"),
    (
        "folders in each other",
        "name: a\nrun: python a.py\ndata: [{name: x, source: /x, mount: /data}, {name: y, source: /y, mount: /data/}]\noutputs: [/data/out, /database]\ncheckpoint: {path: /database/ckpt}\n",
    ),
    ("variable and secret", "name: a\nrun: python a.py\nenv: {TOKEN_FILE: x}\nsecrets: {TOKEN_FILE: a/b}\n"),
    (
        "reserved variables",
        "name: a\nrun: python a.py\nenv:\n  MASTER_ADDR: localhost\n  PET_NPROC_PER_NODE: 8\n  AVIFLOW_X: 1\n  WORLD_SIZE: 16\nsecrets: {RANK: a/b}\n",
    ),
    ("shared memory", "name: a\nrun: python a.py\ngpusPerNode: 2\nresources: {memoryPerGpu: 16Gi, shm: 32Gi}\n"),
    ("saves too late", "name: a\nrun: python a.py\ntimeLimit: 1h\ncheckpoint: {path: /c, every: 2h}\n"),
    ("one GPU of each node", "name: a\nrun: torchrun a.py\nnodes: 4\n"),
    ("launcher and perGpu", "name: a\nrun: torchrun train.py\ngpusPerNode: 8\nprocesses: perGpu\n"),
    (
        "launcher in a script and perGpu",
        "name: a\nrun: |\n  # torchrun is below\n  pip list\n  accelerate launch train.py\ngpusPerNode: 8\nprocesses: perGpu\n",
    ),
];

const RUN: &[(&str, &str)] = &[
    ("operators", "name: a\nrun: cd src && python train.py > log.txt 2>&1 | tee x; ls\n"),
    ("variables", "name: a\nrun: python train.py --out $HOME/out --user \"${USER}\" '$KEPT'\n"),
    ("substitution", "name: a\nrun: python train.py --id $(date +%s)\n"),
    ("pattern", "name: a\nrun: python train.py data/*.jsonl ~/x\n"),
    ("assignment", "name: a\nrun: NCCL_DEBUG=INFO python train.py\n"),
    ("builtin", "name: a\nrun: source venv/bin/activate\n"),
    ("apostrophe", "name: a\nrun: echo it's done\n"),
    ("quote in a folded text", "name: a\nrun: >\n  python train.py\n  --note \"half\n"),
    ("blank", "name: a\nrun: \"  \"\n"),
    (
        "long line",
        "name: a\nrun: torchrun --nproc-per-node 8 train.py --model meta-llama/Llama-3.1-8B --dataset corpus --learning-rate 1e-5 --warmup 100 --epochs 3 --output out | tee train.log --with more words and more words and more words until the line is long\n",
    ),
];

const WIRING: &[(&str, &str)] = &[
    (
        "localhost",
        "name: a\nnodes: 2\ngpusPerNode: 8\nrun: torchrun --master_addr=localhost --master-port 29500 --nnodes 2 --node_rank 0 train.py\n",
    ),
    ("standalone", "name: a\nnodes: 2\ngpusPerNode: 8\nrun: [torchrun, --standalone, --nproc-per-node, 4, train.py]\n"),
    (
        "in a script",
        "name: a\nnodes: 2\ngpusPerNode: 8\nrun: |\n  export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500\n  export WORLD_SIZE=16\n  torchrun --rdzv-endpoint=localhost:29500 train.py\n",
    ),
];

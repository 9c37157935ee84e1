"""Prompts of many kinds for the end-to-end tests."""

ENGLISH = [
    "The lighthouse keeper wrote in his journal every night, and on this night he wrote about",
    "Photosynthesis is the process by which",
    "Once upon a time there was a small robot who wanted to",
    "List three reasons why people learn to play the piano:",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969 the first humans landed on the Moon. Their names were",
    "The recipe needs two eggs, a cup of flour and",
    "Q: What do bees make?\nA:",
]
CHINESE = [
    "今天天气很好，我们一起去公园",
    "机器学习是人工智能的一个分支，它",
    "从前有一座山，山里有一座庙，",
    "请用一句话介绍北京：",
]
EMOJI = [
    "🎉🎂 Happy birthday! 🎈 I wish you",
    "The family 👨‍👩‍👧‍👦 went to the beach 🏖️ and",
    "Weather today: ☀️🌤️⛅🌧️ tomorrow:",
    "🚀🚀🚀",
]
CODE = [
    "def fibonacci(n):\n    ",
    "for (int i = 0; i < 10; i++) {\n\tprintf(",
    "SELECT name, age FROM users WHERE",
    '{"name": "Alice", "age": 30, "city": ',
]
ONE_TOKEN = ["The", "import"]
LONG = [
    "\n".join(
        f"{i}. The traveller of day {i} walked {i * 7 % 31} miles and met {i * 3 % 11} people." for i in range(1, 47)
    ),
    "\n".join(f"    value_{i} = compute({i}, {i * i})  # step {i}" for i in range(1, 17)),
]
ALL = [*ENGLISH, *CHINESE, *EMOJI, *CODE, *ONE_TOKEN, *LONG]

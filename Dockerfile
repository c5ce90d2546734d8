# docker build -t pretrain .
# docker run --gpus all --ipc=host -v "$PWD/data:/app/data" -v "$PWD/out:/app/out" pretrain \
#     torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py
# PyTorch's wheel brings CUDA 13: the host needs NVIDIA's driver 580 or later. Not built where it was written.
FROM python:3.12-slim
# torch.compile and Triton build their host code with a C++ compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
CMD ["python", "train.py", "--help"]

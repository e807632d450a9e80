"""Lightning with accelerator="gpu": fit, validate, predict, a checkpoint, and restoring from it."""

import tempfile

import torch

try:
    import lightning as L
except ImportError:
    import pytorch_lightning as L


class Model(L.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, index):
        x, y = batch
        assert x.device == self.device and x.is_cuda == torch.cuda.is_available()
        loss = torch.nn.functional.mse_loss(self(x), y)
        print(f"= loss {loss.item():.4f}")
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


if __name__ == "__main__":
    L.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(16, 5), torch.randn(16, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1,
            max_epochs=1,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            gradient_clip_val=0.5,
        )
        model = Model()
        trainer.fit(model, loader, loader)
        print(f"= val {float(trainer.callback_metrics['val_loss']):.4f}")
        path = trainer.checkpoint_callback.best_model_path
        loaded = Model.load_from_checkpoint(path)
        predictions = torch.cat(trainer.predict(loaded, loader))
        print(f"= predicted {predictions.mean().item():.4f}")

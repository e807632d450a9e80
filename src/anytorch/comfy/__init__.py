"""ComfyUI nodes, in the order a value passes through them.

comfyui     what the ComfyUI server lends us (device, progress, folders), and what we do where there is none
values      what flows along links: tensors, images, weights, a device; and the sentences for what cannot be used
places      where a node computes: a torch device, or NumPy through anytorch.lite
weights     a layer's numbers: from a seed, from a file, by name; with the nodes for files
nodes, devices, jobs     the nodes themselves, a module per kind
pack        the two dictionaries ComfyUI reads

Nothing here imports ComfyUI: a module of its is used if the running server has imported it. So every node also works in a
plain Python program, which is how the tests call them.
"""

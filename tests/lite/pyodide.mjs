// node pyodide.mjs FOLDER SRC PROGRAM: runs a Python program in WebAssembly, with our sources and the NumPy in FOLDER/numpy.
import { readFileSync, realpathSync } from "node:fs";
import { createRequire } from "node:module";

const [folder, source, program] = process.argv.slice(2);
const { loadPyodide } = createRequire(`${folder}/package.json`)("pyodide");
const python = await loadPyodide();
for (const [name, root] of [["/numpy", `${folder}/numpy`], ["/src", source]]) {
  python.FS.mkdirTree(name);
  python.FS.mount(python.FS.filesystems.NODEFS, { root: realpathSync(root) }, name);
}
python.runPython(`import sys; sys.path[:0] = ["/src", "/numpy"]`);
try {
  python.runPython(readFileSync(program, "utf8"));
} catch (error) {
  console.log(String(error)); // Node would print the whole interpreter, which is one line
}

// Package files is the source of objects in a directory.
//
//  1. tree.go reads the directory: again when watch.go announces a change, or once a second. It compares
//     stamps (size, times, inode), and reads the content of files whose stamp has changed. A tree is used
//     when two reads in a row have found the same, so that few files are used half written.
//  2. yaml.go splits a file into documents, and knows the line of every field; parse.go makes objects of documents,
//     with package decode. A broken document affects only its own objects.
//  3. source.go merges them: it decides which objects are in use. An object that becomes broken, or that cannot be
//     read, stays in use in its last good form. So do all objects of a file or a directory that is
//     empty now. An object that is missing stays for a moment: its file may be half written, or it
//     is on its way to another one.
//  4. state.go saves the last good form of every object in the state directory.
//
// source.go repeats this, and tells the control plane what has changed.
package files

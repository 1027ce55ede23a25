// Package files is the source of objects in a directory.
//
//  1. tree.go reads the directory every half second. It compares stamps (size, times, inode), and reads the content of
//     files whose stamp is new or has changed. The result of a read is a tree. A tree is used when two reads in a row
//     have found it, because then hardly any file is half written. If the files change before each read, every tenth
//     tree is used.
//  2. parse.go splits a file into documents (package yamltext), makes JSON of them, and passes that to package decode. A
//     broken document affects only its own objects.
//  3. source.go decides which of these objects are in use. An object that becomes broken, or that cannot be
//     read, stays in use in its last good form. All objects of a file or a directory that has become
//     empty stay in use, too, unless AllowEmpty is set. An object that is missing stays in use for a moment: its file
//     may be half written, or the object may be on its way to another file.
//  4. state.go saves the last good form of every object in the state directory.
//
// source.go repeats these steps, and tells the control plane which objects have changed.
package files

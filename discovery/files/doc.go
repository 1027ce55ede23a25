// Package files is the source of objects in a directory.
//
//  1. look.go looks at the directory once a second. A look has the stamps (size, times, inode) of the files. What a look
//     finds is used when the next one finds the same, because then hardly any file is half written, and files that are
//     replaced one after the other are all there.
//  2. parse.go splits a file into documents (package yamltext), and makes JSON of them, and passes that to package
//     decode.
//  3. source.go repeats these steps, and tells the control plane which objects have changed. The content of a file that is
//     in use is the last good one: a content that has an error, or that has lost all objects, changes nothing. A file is in
//     use until it is removed; one that cannot be read, or that is below a directory that cannot be read, is not removed.
package files

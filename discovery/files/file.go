package files

import "github.com/nametap/nametap/discovery/object"

// A file is a file in use, with its last good content. If no good content was seen yet, it has what is right of the
// content that was read last. Files do not change.
type file struct {
	*parsed
	data  []byte
	good  bool           // nothing is wrong with the content in use
	kept  bool           // the content in use is older than the one that was read last
	stamp stamp          // of the content that was read last
	wrong []object.Error // what is wrong with that content
}

// newFile returns the file for a content.
func newFile(name string, stamp stamp, data []byte) *file {
	p := parseFile(name, data)
	return &file{parsed: p, data: data, good: len(p.errs) == 0, stamp: stamp, wrong: p.errs}
}

// after returns the file with a new content. f may be nil. A content without objects is not good if f has objects, unless
// allowEmpty is true: a program whose output goes to the file may have only begun, or have failed.
func (f *file) after(name string, stamp stamp, data []byte, allowEmpty bool) *file {
	now := newFile(name, stamp, data)
	empty := len(now.objects)+len(now.notes) == 0 && !allowEmpty
	if f == nil || !f.good || len(f.objects) == 0 || now.good && !empty {
		return now
	}
	kept := *f
	kept.stamp, kept.kept, kept.wrong = stamp, true, now.wrong
	if now.good {
		kept.wrong = []object.Error{{File: name, Msg: "holds no object any more: write it again, or remove it if that is intended"}}
	}
	for i := range kept.wrong {
		kept.wrong[i].Kept = true
		kept.wrong[i].Msg += "; the whole file stays in use as it was before"
	}
	return &kept
}

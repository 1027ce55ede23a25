package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"unsafe"
)

// The sections of a message, in order (RFC 1035, section 4.1).
const (
	QuestionSection = iota
	AnswerSection
	AuthoritySection
	AdditionalSection
	Sections // the number of sections
)

// The fixed part of a record, between its owner and its data: type, class, TTL and the
// length of the data (RFC 1035, section 3.2.1).
const (
	FixedLen      = 10
	TTLOffset     = 4
	DataLenOffset = 8
)

const (
	labelType = 0xC0 // the bits of a label's first byte that distinguish a length from a pointer
	// maxPointers is the largest number of compression pointers that the longest name can need. Without
	// this bound the names of one message could cost 10^7 steps.
	maxPointers = (MaxNameLen + 1) / 2
	// questionFixedLen is the length of a question's type and class.
	questionFixedLen = 4
)

var (
	// ErrShort is the error for a message that ends within its header, a question or a record.
	ErrShort     = errors.New("the message ends within it")
	errLabelType = errors.New("a label is of an unknown type")
	errPointer   = errors.New("a compressed name points elsewhere than at an earlier name")
)

// Count returns how many questions or records a section has according to the header.
func Count(msg []byte, section int) int {
	return int(binary.BigEndian.Uint16(msg[countsOffset+2*section:]))
}

// PutCount sets the number of questions or records of a section in the header.
func PutCount(msg []byte, section int, n uint16) {
	binary.BigEndian.PutUint16(msg[countsOffset+2*section:], n)
}

// PutCounts sets the numbers of questions and records of all sections in the header.
func PutCounts(msg []byte, n *[Sections]uint16) {
	binary.BigEndian.PutUint64(msg[countsOffset:], uint64(n[QuestionSection])<<48|
		uint64(n[AnswerSection])<<32|uint64(n[AuthoritySection])<<16|uint64(n[AdditionalSection]))
}

// WalkQuestion returns where the question at offset ends. Its name must not be compressed.
func WalkQuestion(msg []byte, offset int) (end int, err error) {
	for start := offset; ; {
		next, pointer, err := walkLabel(msg, offset)
		switch {
		case err != nil:
			return 0, err
		case pointer:
			return 0, errPointer
		case next-start > MaxNameLen+1:
			return 0, ErrLongName
		case next == offset+1 && next+questionFixedLen > len(msg):
			return 0, ErrShort
		case next == offset+1:
			return next + questionFixedLen, nil
		}
		offset = next
	}
}

// WalkQuestions returns where the question section of a message ends. The message must have a whole header.
func WalkQuestions(msg []byte) (end int, err error) {
	end = HeaderLen
	for range Count(msg, QuestionSection) {
		if end, err = WalkQuestion(msg, end); err != nil {
			return 0, err
		}
	}
	return end, nil
}

// EqualQuestions reports whether two questions in wire form differ at most in the case of
// their names' letters.
func EqualQuestions(a, b []byte) bool {
	name := len(a) - questionFixedLen
	return len(a) == len(b) && name >= 0 && equalFold(a[:name], b[:name]) && bytes.Equal(a[name:], b[name:])
}

// equalFold reports whether two names in wire form are equal when ASCII letters are compared
// without regard to case (RFC 4343).
func equalFold(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i, c := range a {
		// Length bytes are at most 63, below 'A', so folding all bytes is safe.
		if FoldByte(c) != FoldByte(b[i]) {
			return false
		}
	}
	return true
}

// A Walker walks the records of a message in order.
type Walker struct {
	// Section is the section of the current record. The record begins at Owner with the name that owns it, has its
	// fixed part at Fixed and ends at End.
	Section           int
	Owner, Fixed, End int
	// Spelled reports whether the owner is the first question's name and begins with labels. It is false if the owner
	// is only a pointer to the question.
	Spelled bool

	// Err says why Next has reported false before the end of the message. It is nil if Next has not.
	Err error

	msg  []byte
	left int // records left in the section
}

// Walk returns a Walker for the records of msg. The question section of msg must end at questionEnd.
// The Walker stands before the first record.
func Walk(msg []byte, questionEnd int) Walker {
	return Walker{msg: msg, End: questionEnd}
}

// Next goes to the next record. It reports false if there is none, or if the record is malformed. In the second case
// it sets Err.
func (w *Walker) Next() bool {
	for w.left == 0 {
		if w.Section == AdditionalSection {
			return false
		}
		w.Section++
		w.left = Count(w.msg, w.Section)
	}
	w.left--
	const pointer = PointerBits | HeaderLen // a pointer to the question's name; nearly all owners are this pointer
	msg, offset := w.msg, w.End
	w.Owner, w.Spelled = offset, false
	fixed := offset + 2
	if fixed > len(msg) || binary.BigEndian.Uint16(msg[offset:]) != pointer {
		if fixed, w.Spelled, w.Err = WalkName(msg, offset); w.Err != nil {
			return false
		}
	}
	if fixed+FixedLen > len(msg) {
		w.Err = ErrShort
		return false
	}
	end := fixed + FixedLen + int(binary.BigEndian.Uint16(msg[fixed+DataLenOffset:]))
	if end > len(msg) {
		w.Err = ErrShort
		return false
	}
	w.Fixed, w.End = fixed, end
	return true
}

// Type returns the type of the current record.
func (w *Walker) Type() uint16 { return binary.BigEndian.Uint16(w.msg[w.Fixed:]) }

// WalkName returns where the name at offset ends. isQuestion reports whether it equals the first question's name,
// without regard to case. The question must have been walked before.
//
// A pointer leads back to an earlier run of labels. That run must end before the run that contains the pointer
// begins. So every walk ends.
func WalkName(msg []byte, offset int) (end int, isQuestion bool, err error) {
	isQuestion = true
	start, bound := offset, len(msg) // where the run of labels around offset begins, and where it must end
	for question, length, pointers := HeaderLen, 0, 0; ; {
		next, pointer, err := walkLabel(msg[:bound], offset)
		if err != nil && pointers > 0 {
			err = errPointer
		}
		if err != nil {
			return 0, false, err
		}
		if pointer {
			if pointers++; pointers == 1 {
				end = next
			}
			target := PointerTarget(msg, offset)
			if target < HeaderLen || target >= start || pointers > maxPointers {
				return 0, false, errPointer
			}
			offset, start, bound = target, target, start
			continue
		}
		n := next - offset
		if length += n; length > MaxNameLen+1 {
			return 0, false, ErrLongName
		}
		isQuestion = isQuestion && len(msg)-question >= n && equalFold(msg[question:question+n], msg[offset:next])
		question += n // not used unless isQuestion is true
		offset = next
		switch {
		case n > 1:
		case pointers > 0:
			return end, isQuestion, nil
		default:
			return offset, isQuestion, nil
		}
	}
}

// walkLabel returns where the label or the pointer at offset ends.
func walkLabel(msg []byte, offset int) (next int, pointer bool, err error) {
	if offset >= len(msg) {
		return 0, false, ErrShort
	}
	switch msg[offset] & labelType {
	case 0:
		next = offset + 1 + int(msg[offset])
	case labelType:
		next, pointer = offset+2, true
	default:
		return 0, false, errLabelType
	}
	if next > len(msg) {
		return 0, false, ErrShort
	}
	return next, pointer, nil
}

// PointerTarget returns the offset that the pointer at offset leads to.
func PointerTarget(msg []byte, offset int) int {
	return int(binary.BigEndian.Uint16(msg[offset:]) &^ PointerBits)
}

// NameAt returns the name at offset, which must be well-formed. The result is in the memory of buf.
func NameAt(msg []byte, offset int, buf *[MaxNameLen]byte) Name {
	n := 0
	for msg[offset] != 0 {
		if IsPointer(msg[offset]) {
			offset = PointerTarget(msg, offset)
			continue
		}
		for _, c := range msg[offset : offset+1+int(msg[offset])] {
			buf[n] = FoldByte(c)
			n++
		}
		offset += 1 + int(msg[offset])
	}
	return Name(unsafe.String(&buf[0], n))
}

// IsPointer reports whether b is the first byte of a compression pointer, and not of a label.
func IsPointer(b byte) bool { return b&labelType == labelType }

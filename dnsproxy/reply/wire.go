package reply

import (
	"encoding/binary"
	"errors"
)

// The parts of a message's header (RFC 1035, section 4.1.1; AD and CD: RFC 4035).
const (
	headerLen    = 12
	flagsOffset  = 2
	countsOffset = 4 // of four counts of two bytes: questions, and the three sections

	bitQR, bitAA, bitTC, bitRD = 0x80, 0x04, 0x02, 0x01 // of the first flags byte
	maskOpcode                 = 0x78
	bitRA, bitAD, bitCD        = 0x80, 0x20, 0x10 // of the second
	maskRcode                  = 0x0F
)

// The fixed part of a record, between the owner and the data: type, class, TTL and
// the data's length (RFC 1035, section 4.1.3).
const (
	fixedLen     = 10
	classOffset  = 2
	ttlOffset    = 4
	lengthOffset = 8
)

// The bounds of names (RFC 1035, sections 2.3.4 and 4.1.4).
const (
	maxNameLen  = 255
	labelType   = 0xC0 // the bits of a length that say what it is
	pointerBits = 0xC000
	// maxPointers is as many as the longest name could have use for. Without this
	// bound the names of one reply could cost 10^7 steps.
	maxPointers = maxNameLen / 2
)

var (
	errShort     = errors.New("the message ends within it")
	errLongName  = errors.New("a name is longer than 255 bytes")
	errLabelType = errors.New("a label is of a type that does not exist")
	errPointer   = errors.New("a compressed name points elsewhere than at an earlier name")
)

// walkRecord walks the record at off and returns where its fixed part is and where
// it ends. respell is set if its owner is the question's name, but not as a pointer
// to that.
func walkRecord(msg []byte, off int) (fixed, end int, respell bool, err error) {
	const pointer = pointerBits | headerLen // to the question's name, as nearly all owners are
	if off+2 <= len(msg) && binary.BigEndian.Uint16(msg[off:]) == pointer {
		fixed = off + 2
	} else if fixed, respell, err = walkName(msg, off); err != nil {
		return 0, 0, false, err
	}
	if fixed+fixedLen > len(msg) {
		return 0, 0, false, errShort
	}
	end = fixed + fixedLen + int(binary.BigEndian.Uint16(msg[fixed+lengthOffset:]))
	if end > len(msg) {
		return 0, 0, false, errShort
	}
	return fixed, end, respell, nil
}

// walkName walks the owner name at off and returns where it ends. same is true if
// it is the question's name, compared without regard to case; the question must
// have been walked by walkQuestion.
//
// What a pointer leads to begins and ends before the labels that the pointer
// follows, so that every walk ends.
func walkName(msg []byte, off int) (end int, same bool, err error) {
	same = true
	start, bound := off, len(msg) // of the labels that off is among
	for question, length, pointers := headerLen, 0, 0; ; {
		next, pointer, err := walkLabel(msg[:bound], off)
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
			target := int(binary.BigEndian.Uint16(msg[off:]) &^ pointerBits)
			if target < headerLen || target >= start || pointers > maxPointers {
				return 0, false, errPointer
			}
			off, start, bound = target, target, start
			continue
		}
		n := next - off
		if length += n; length > maxNameLen {
			return 0, false, errLongName
		}
		same = same && equalLabel(msg[question:], msg[off:next])
		question += n // of no use unless same
		off = next
		switch {
		case n > 1:
		case pointers > 0:
			return end, same, nil
		default:
			return off, same, nil
		}
	}
}

// walkLabel returns where the label at off ends, or the pointer.
func walkLabel(msg []byte, off int) (next int, pointer bool, err error) {
	if off >= len(msg) {
		return 0, false, errShort
	}
	switch msg[off] & labelType {
	case 0:
		next = off + 1 + int(msg[off])
	case labelType:
		next, pointer = off+2, true
	default:
		return 0, false, errLabelType
	}
	if next > len(msg) {
		return 0, false, errShort
	}
	return next, pointer, nil
}

// walkQuestion walks the question at off, whose name is not compressed, and
// returns where it ends.
func walkQuestion(msg []byte, off int) (end int, err error) {
	const typeAndClass = 4
	for start := off; ; {
		next, pointer, err := walkLabel(msg, off)
		switch {
		case err != nil:
			return 0, err
		case pointer:
			return 0, errPointer
		case next-start > maxNameLen:
			return 0, errLongName
		case next == off+1 && next+typeAndClass > len(msg):
			return 0, errShort
		case next == off+1:
			return next + typeAndClass, nil
		}
		off = next
	}
}

// equalLabel reports whether b begins with label, its length byte included, when
// ASCII letters are compared without regard to case (RFC 4343).
func equalLabel(b, label []byte) bool {
	if len(b) < len(label) {
		return false
	}
	for i, c := range label {
		// Length bytes are at most 63, below 'A', so folding all bytes is safe.
		if foldByte(b[i]) != foldByte(c) {
			return false
		}
	}
	return true
}

func foldByte(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + ('a' - 'A')
	}
	return c
}

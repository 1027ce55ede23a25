package intake

import "golang.org/x/net/http2"

const (
	frameHead   = 9       // bytes before each frame
	maxFrame    = 1 << 14 // bytes in a frame: gRPC accepts no longer frames
	frameLength = 3       // bytes of the length, which begins the head
	frameType   = 3       // index of the type in the head
)

// frames finds the DATA and HEADERS frames in the bytes that a client sends (RFC 9113, sections 3.4, 4.1, 6.1 and 6.2).
type frames struct {
	streams int // HEADERS frames, with each of which a client begins a stream
	skip    int // bytes until the next head
	head    [frameHead]byte
	headLen int // number of bytes in head
}

// newFrames returns the frames of a new connection.
func newFrames() frames { return frames{skip: len(http2.ClientPreface)} }

// read follows the next bytes. It returns how many DATA frames begin in them, and the size of these frames. It counts all
// bytes of a frame when the frame begins, because gRPC then makes room for the whole frame. It also counts padding, which
// clients of gRPC do not send.
func (f *frames) read(p []byte) (count, data int) {
	for len(p) > 0 {
		switch {
		case f.skip > 0:
			n := min(f.skip, len(p))
			f.skip -= n
			p = p[n:]
		default:
			n := copy(f.head[f.headLen:], p)
			f.headLen += n
			p = p[n:]
			if f.headLen < frameHead {
				break
			}
			f.headLen = 0
			length := 0
			for _, b := range f.head[:frameLength] {
				length = length<<8 | int(b)
			}
			f.skip = length
			switch http2.FrameType(f.head[frameType]) {
			case http2.FrameData:
				count, data = count+1, data+min(length, maxFrame)
			case http2.FrameHeaders:
				f.streams++
			}
		}
	}
	return count, data
}
